#include "kvbm/last_touches.hpp"

#include <nanobind/stl/pair.h>

#include "kvbm/words.hpp"
#include "python.hpp"

namespace kvbm::bindings {
namespace {

// A list or tuple of block ids, each below `blocks`. Throws Error: kLayout.
std::span<const std::uint32_t> ids_of(nb::handle ids, std::size_t blocks, std::vector<std::uint32_t>& room) {
  PyObject* const items = ids.ptr();
  const bool is_list = PyList_Check(items) != 0;
  if (!is_list && !PyTuple_Check(items)) {
    throw Error(ErrorCode::kLayout,
                words("block ids are ", nb::str(ids.type().attr("__name__")).c_str(), "; give a list or tuple"));
  }
  room.resize(static_cast<std::size_t>(length_of(items, is_list)));
  for (std::size_t at = 0; at < room.size(); ++at) {
    room[at] = number<std::uint32_t>(item_of(items, is_list, static_cast<Py_ssize_t>(at)));
    if (room[at] >= blocks) {
      throw Error(ErrorCode::kLayout,
                  "block " + std::to_string(room[at]) + " of an HBM of " + std::to_string(blocks) + " blocks");
    }
  }
  return room;
}

std::int64_t plan(LastTouches& touches, nb::handle taken) {
  const std::int64_t step = touches.begin_step();
  std::vector<std::uint32_t> room;
  for (const nb::handle one : nb::iter(taken)) {
    const auto [request, groups] = nb::cast<std::pair<nb::object, nb::object>>(one);
    const std::string name(utf8(request, "a request's name"));
    for (const nb::handle ids : groups) {
      touches.hold(name, ids_of(ids, touches.blocks(), room));
    }
  }
  return step;
}

}  // namespace

void bind_last_touches(nb::module_& module, const SharedErrors& errors) {
  nb::class_<LastTouches>(module, "LastTouches")
      .def(nb::init<std::size_t>(), nb::arg("blocks"))
      .def_prop_ro("step", &LastTouches::step)
      .def(
          "plan",
          [errors](LastTouches& self, nb::handle taken) {
            return translated(errors, [&] { return plan(self, taken); });
          },
          nb::arg("taken"))
      .def(
          "leave",
          [errors](LastTouches& self, nb::handle request) {
            translated(errors, [&] { self.leave(std::string(utf8(request, "a request's name"))); });
          },
          nb::arg("request"))
      .def(
          "of",
          [errors](const LastTouches& self, nb::handle ids) {
            std::vector<std::uint32_t> room;
            return translated(errors, [&] { return self.of(ids_of(ids, self.blocks(), room)); });
          },
          nb::arg("ids"));
}

}  // namespace kvbm::bindings
