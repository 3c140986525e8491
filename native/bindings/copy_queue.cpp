#include "kvbm/copy_queue.hpp"

#include <algorithm>
#include <chrono>
#include <unordered_map>
#include <utility>
#include <variant>

#include "segment_copy.hpp"

namespace kvbm::bindings {
namespace {

// A queue and what its runs name, all of it touched with the GIL only.
class Queue {
 public:
  explicit Queue(nb::object copies)
      : copies_(std::move(copies)),
        table_(nb::cast<const Copies&>(copies_).table),
        queue_(table_, nb::cast<const Copies&>(copies_).copier) {}
  Queue(const Queue&) = delete;
  Queue& operator=(const Queue&) = delete;
  ~Queue() { close(); }

  void gather(std::uint64_t id, Indexes slots, Rows rows, Indexes at) {
    checked(table_, slots, rows, at);
    auto sums = std::make_unique<std::uint32_t[]>(slots.shape(0));
    add(id, {std::move(slots), std::move(at), block_rows<std::uint8_t>(rows), rows, std::move(sums)});
  }

  void scatter(std::uint64_t id, Indexes slots, ConstRows rows, Indexes at) {
    checked(table_, slots, rows, at);
    // The queue has one kind of rows; it only reads those of a scatter.
    const BlockRows<std::uint8_t> named{const_cast<std::uint8_t*>(rows.data()),
                                        static_cast<std::uint64_t>(rows.stride(0))};
    add(id, {std::move(slots), std::move(at), named, rows, nullptr});
  }

  nb::list ended() {
    nb::list all;
    for (const CopyQueue::Ended& run : queue_.ended()) {
      auto named = runs_.extract(run.id);
      Named& kept = named.mapped();
      const std::size_t count = kept.slots.shape(0);
      nb::object sums = kept.sums ? nb::cast(sums_of(std::move(kept.sums), count)) : nb::none();
      all.append(nb::make_tuple(run.id, std::move(sums), std::chrono::duration<double>(run.busy).count(), ""));
    }
    return all;
  }

  std::size_t under_way() const { return queue_.under_way(); }

  bool wait(double timeout_s) {
    const auto timeout = std::chrono::nanoseconds(static_cast<std::int64_t>(std::clamp(timeout_s, 0.0, 1e6) * 1e9));
    const GilReleased released;
    return queue_.wait(timeout);
  }

  void close() {
    {
      const GilReleased released;
      queue_.close();
    }
    runs_.clear();
  }

 private:
  struct Named {
    Indexes slots;                          // of the run
    Indexes at;                             // of the run
    BlockRows<std::uint8_t> rows;           // where they lie
    std::variant<Rows, ConstRows> owner;    // keeps the rows
    std::unique_ptr<std::uint32_t[]> sums;  // of a gather
  };

  void add(std::uint64_t id, Named named) {
    const auto [at, is_new] = runs_.try_emplace(id, std::move(named));
    if (!is_new) {
      throw Error(ErrorCode::kLayout,
                  "run " + std::to_string(id) + " is under way already; give each a number of its own");
    }
    const Named& kept = at->second;
    try {
      queue_.add({id, span_of(kept.slots), span_of(kept.at), kept.rows, kept.sums.get()});
    } catch (...) {
      runs_.erase(at);
      throw;
    }
  }

  nb::object copies_;                              // keeps the table and the copier
  const SegmentTable& table_;                      // of copies_
  std::unordered_map<std::uint64_t, Named> runs_;  // not collected yet
  CopyQueue queue_;                                // ends before what its runs name
};

}  // namespace

void bind_copy_queue(nb::module_& module, const SharedErrors& errors) {
  nb::class_<Queue>(module, "CopyQueue",
                    "Runs of blocks copied in a thread of its own; native implementation of ThreadedQueue.")
      .def(
          "__init__",
          [](Queue* self, nb::object copies) {
            if (!nb::isinstance<Copies>(copies)) {
              throw nb::type_error("a queue copies through a SegmentTable");
            }
            new (self) Queue(std::move(copies));
          },
          nb::arg("copies"))
      .def(
          "gather",
          [errors](Queue& self, std::uint64_t id, Indexes slots, Rows rows, Indexes at) {
            translated(errors, [&] { self.gather(id, std::move(slots), std::move(rows), std::move(at)); });
          },
          nb::arg("id"), nb::arg("slots").noconvert(), nb::arg("rows").noconvert(), nb::arg("at").noconvert())
      .def(
          "scatter",
          [errors](Queue& self, std::uint64_t id, Indexes slots, ConstRows rows, Indexes at) {
            translated(errors, [&] { self.scatter(id, std::move(slots), std::move(rows), std::move(at)); });
          },
          nb::arg("id"), nb::arg("slots").noconvert(), nb::arg("rows").noconvert(), nb::arg("at").noconvert())
      .def("ended", &Queue::ended)
      .def_prop_ro("under_way", &Queue::under_way)
      .def("wait", &Queue::wait, nb::arg("timeout_s"))
      .def("close", &Queue::close);
}

}  // namespace kvbm::bindings
