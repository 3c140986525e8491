#include "kvbm/plain_question.hpp"

#include <algorithm>

#include "answer_classes.hpp"
#include "python.hpp"

namespace kvbm::bindings {
namespace {

PyObject* text_or_none(const std::optional<std::string_view>& text) {
  return text ? PyBytes_FromStringAndSize(text->data(), static_cast<Py_ssize_t>(text->size())) : Py_NewRef(Py_None);
}

PyObject* bytes_of(const std::uint8_t* data, std::size_t size) {
  return PyBytes_FromStringAndSize(reinterpret_cast<const char*>(data), static_cast<Py_ssize_t>(size));
}

// What reads questions, with its room for hashes. GIL held.
class PlainReader {
 public:
  nb::object read(nb::handle data, std::size_t begin, std::size_t end) {
    const BufferView view(data);
    const Bytes bytes = view.bytes();
    end = std::min(end, bytes.size());
    begin = std::min(begin, end);
    if (!read_plain_question({reinterpret_cast<const char*>(bytes.data()) + begin, end - begin}, question_)) {
      return nb::none();
    }
    const PlainQuestion& one = question_;
    return class_(PyLong_FromSize_t(one.request_bytes), PyLong_FromSize_t(one.body_bytes),
                  Py_NewRef(one.is_route ? Py_True : Py_False), text_or_none(one.authorization), text_or_none(one.host),
                  bytes_of(one.namespace_id.data(), one.namespace_id.size()),
                  bytes_of(one.hashes.data(), one.hashes.size()), PyLong_FromUnsignedLong(one.limit),
                  PyLong_FromUnsignedLong(one.input_tokens));
  }

 private:
  const TupleClass class_{nb::module_::import_("kvbm.core.plain_questions"), "PlainQuestion"};  // of answers
  PlainQuestion question_;                                                                      // read last
};

// The catalog's classes are not imported by an engine: the reader is made when the first question comes.
nb::object read(nb::handle data, std::size_t begin, std::size_t end) {
  static PlainReader* const reader = new PlainReader();  // lives as long as the process
  return reader->read(data, begin, end);
}

}  // namespace

void bind_plain_question(nb::module_& module) {
  module.def("read_plain_question", &read, nb::arg("data"), nb::arg("begin"), nb::arg("end"),
             "Reads a lookup or a route as it comes over HTTP, where it is plain, as kvbm.core.plain_questions says.");
}

}  // namespace kvbm::bindings
