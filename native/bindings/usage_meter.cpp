#include "kvbm/usage_meter.hpp"

#include "python.hpp"

namespace kvbm::bindings {
namespace {

nb::tuple numbers(const TierNumbers& values) { return nb::make_tuple(values[0], values[1], values[2], values[3]); }

nb::list cut(UsageMeter& meter, std::uint64_t until_ms) {
  nb::list made;
  for (const NamespaceUsage& one : meter.cut(until_ms)) {
    made.append(nb::make_tuple(copy_bytes(one.id), numbers(one.block_ms), numbers(one.put_blocks)));
  }
  return made;
}

}  // namespace

void bind_usage_meter(nb::module_& module, const SharedErrors& errors) {
  nb::class_<UsageMeter>(module, "UsageMeter")
      .def(
          "__init__",
          [](UsageMeter* self, std::uint8_t clusters) {
            std::array<bool, kTierCount> by_tier{};
            for (std::size_t tier = 0; tier < kTierCount; ++tier) {
              by_tier[tier] = ((clusters >> tier) & 1) != 0;
            }
            new (self) UsageMeter(by_tier);
          },
          nb::arg("clusters"))
      .def(
          "take",
          [errors](UsageMeter& self, nb::handle data, std::size_t at) {
            translated(errors, [&] { self.take(BufferView(data).bytes(), at); });
          },
          nb::arg("data"), nb::arg("at") = 0)
      .def("cut", &cut, nb::arg("until_ms"));
}

}  // namespace kvbm::bindings
