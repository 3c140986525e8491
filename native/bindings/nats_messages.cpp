#include "kvbm/nats_messages.hpp"

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "python.hpp"

namespace kvbm::bindings {
namespace {

nb::bytes python_bytes(std::string_view text) { return nb::bytes(text.data(), text.size()); }

// Text of UTF-8; null, without an error, when it is none.
nb::object python_utf8(std::string_view text) {
  PyObject* const made = PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), nullptr);
  if (made == nullptr) {
    PyErr_Clear();
  }
  return nb::steal(made);
}

// As kvbm.streams.nats.messages.ReadableMessages. GIL held.
class PythonNatsMessages {
 public:
  void watch(std::uint64_t subscription) {
    if (!is_watched(subscription)) {
      watched_.push_back(subscription);
    }
  }

  void forget(std::uint64_t subscription) { std::erase(watched_, subscription); }

  void reset() {
    rest_.clear();
    needed_ = 0;
  }

  nb::tuple take(const nb::bytes& data) {
    const std::string_view came(data.c_str(), data.size());
    if (rest_.empty()) {
      return scan(came);
    }
    rest_ += came;
    if (rest_.size() < needed_) {
      return nb::make_tuple(nb::list(), false);
    }
    const std::string all = std::move(rest_);
    return scan(all);
  }

 private:
  // Messages of one subscription that the consumer counted one after the other.
  struct Run {
    std::uint64_t subscription;
    std::uint64_t first;
    std::uint64_t last;
    std::uint64_t pending;
    nb::list messages;
  };

  bool is_watched(std::uint64_t subscription) const {
    return std::find(watched_.begin(), watched_.end(), subscription) != watched_.end();
  }

  nb::tuple scan(std::string_view data) {
    NatsScan scan(data);
    nb::list items;
    std::optional<Run> run;
    const auto end_run = [&] {
      if (run) {
        items.append(nb::make_tuple(run->subscription, run->first, run->pending, run->messages));
        run.reset();
      }
    };
    while (true) {
      const NatsScan::Found found = scan.next();
      if (found == NatsScan::Found::kMessage) {
        if (!extend(run, scan.message())) {
          end_run();
          if (!extend(run, scan.message())) {
            const NatsMessage& message = scan.message();
            items.append(nb::make_tuple(message.subscription, python_bytes(message.subject),
                                        python_bytes(message.reply), python_bytes(message.headers),
                                        python_bytes(message.payload)));
          }
        }
        continue;
      }
      end_run();
      if (found == NatsScan::Found::kLine) {
        items.append(python_bytes(scan.line()));
        continue;
      }
      rest_ = data.substr(scan.at());
      needed_ = scan.needed();
      return nb::make_tuple(items, found == NatsScan::Found::kMalformed);
    }
  }

  // Adds a message to a run, which begins with it if there is none; false: it does not belong there.
  bool extend(std::optional<Run>& run, const NatsMessage& message) const {
    if (run && run->subscription != message.subscription) {
      return false;
    }
    const auto delivery = is_watched(message.subscription) ? nats_delivery(message.reply) : std::nullopt;
    if (!delivery || (run && delivery->count != run->last + 1)) {
      return false;
    }
    const nb::object subject = python_utf8(message.subject);
    if (!subject.is_valid()) {
      return false;
    }
    const auto fence = nats_fence(message.headers);
    if (!run) {
      run = Run{message.subscription, delivery->count, delivery->count, delivery->pending, nb::list()};
    }
    run->last = delivery->count;
    run->pending = delivery->pending;
    run->messages.append(nb::make_tuple(delivery->sequence, subject, python_bytes(message.payload), delivery->stored_ns,
                                        fence ? nb::object(python_bytes(*fence)) : nb::none()));
    return true;
  }

  std::vector<std::uint64_t> watched_;  // subscriptions whose messages are joined to runs
  std::string rest_;                    // what came and is not all of anything
  std::size_t needed_ = 0;              // bytes of it before it is worth a look; 0: not known
};

}  // namespace

void bind_nats_messages(nb::module_& module) {
  using Self = PythonNatsMessages;
  nb::class_<Self>(module, "NatsMessages",
                   "What a NATS server sends, taken apart. As kvbm.streams.nats.messages.ReadableMessages.")
      .def(nb::init<>())
      .def("watch", &Self::watch, nb::arg("subscription"))
      .def("forget", &Self::forget, nb::arg("subscription"))
      .def("reset", &Self::reset)
      .def("take", &Self::take, nb::arg("data"));
}

}  // namespace kvbm::bindings
