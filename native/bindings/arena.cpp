#include "kvbm/arena.hpp"

#include <nanobind/ndarray.h>

#include <optional>
#include <system_error>
#include <utility>

#include "python.hpp"

namespace kvbm::bindings {
namespace {

using Memory = nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<1>>;

[[noreturn]] void raise_os_error(const std::system_error& error) {
  PyErr_SetObject(PyExc_OSError, nb::make_tuple(error.code().value(), error.what()).ptr());
  throw nb::python_error();
}

}  // namespace

void bind_arena(nb::module_& module) {
  nb::class_<Arena>(module, "Arena", "Shared memory that other processes can map, all of it there.")
      .def(
          "__init__",
          [](Arena* self, std::string name, std::size_t bytes, bool huge_pages, bool advise, int numa_node,
             unsigned threads) {
            const Arena::Wishes wishes{std::move(name), bytes, huge_pages, advise, numa_node, threads};
            std::optional<std::system_error> refusal;
            {
              const GilReleased released;
              try {
                new (self) Arena(wishes);
              } catch (const std::system_error& error) {
                refusal = error;
              }
            }
            if (refusal) {
              raise_os_error(*refusal);
            }
          },
          nb::arg("name"), nb::arg("bytes"), nb::arg("huge_pages") = false, nb::arg("advise") = true,
          nb::arg("numa_node") = -1, nb::arg("threads") = 1)
      .def_prop_ro("fd", &Arena::fd, "Its descriptor, closed with the arena; -1 where the system has none.")
      .def_prop_ro("bytes", &Arena::bytes, "Its size, whole pages.")
      .def_prop_ro("page_bytes", &Arena::page_bytes, "Size of one page as it was asked for.")
      .def_prop_ro(
          "memory",
          [](nb::handle_t<Arena> self) {
            const Arena& arena = nb::cast<Arena&>(self);
            return Memory(arena.data(), {arena.bytes()}, self);
          },
          "All its bytes; they keep the arena.");
}

}  // namespace kvbm::bindings
