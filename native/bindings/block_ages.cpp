#include "kvbm/block_ages.hpp"

#include "python.hpp"

namespace kvbm::bindings {
namespace {

// The GIL is held throughout: another thread may ask while one takes.
void take(BlockAges& ages, nb::handle data, std::size_t at) {
  const BufferView view(data);
  ages.take(view.bytes(), at);
}

nb::tuple counts(const AgeCounts& numbers) {
  nb::list made;
  for (const std::uint64_t number : numbers) {
    made.append(number);
  }
  return nb::tuple(made);
}

nb::list tiers(const BlockAges& ages) {
  const nb::object kind = nb::module_::import_("kvbm.core.ages").attr("TierAges");
  nb::list made;
  for (const TierAges& one : ages.tiers()) {
    made.append(kind(counts(one.wanted), counts(one.evicted), one.wanted_s, one.evicted_s, one.reused, one.unused));
  }
  return made;
}

}  // namespace

void bind_block_ages(nb::module_& module, const SharedErrors& errors) {
  nb::class_<BlockAges>(module, "BlockAges")
      .def(nb::init<std::size_t, std::uint64_t>(), nb::arg("most"), nb::arg("every") = 1)
      .def(
          "take",
          [errors](BlockAges& self, nb::handle data, std::size_t at) {
            translated(errors, [&] { take(self, data, at); });
          },
          nb::arg("data"), nb::arg("at") = 0)
      .def("forget", &BlockAges::forget)
      .def("tiers", &tiers);
}

}  // namespace kvbm::bindings
