#include "kvbm/ledger_lock.hpp"

#include <chrono>
#include <cmath>
#include <new>

#include "native_objects.hpp"

// A type of C, not of nanobind: an engine takes this lock some times a step, and a call of C costs half as much.

namespace kvbm::bindings {
namespace {

constexpr double kLongestS = 1e6;  // longer is for ever

struct LockObject {
  PyObject_HEAD LedgerLock lock;  // what it is about
  unsigned long holder;           // thread that has it, 0 for none; the GIL guards it
};

PyTypeObject* lock_type = nullptr;  // made once, at import; it lives as long as the process

LockObject* as_lock(PyObject* self) noexcept { return reinterpret_cast<LockObject*>(self); }

// 1: taken; 0: the time is over; -1: a Python error is set. timeout_s: negative for ever.
int wait_and_take(LockObject* self, double timeout_s) {
  const auto begin = std::chrono::steady_clock::now();
  while (!self->lock.try_lock()) {
    std::int64_t left_ns = -1;
    if (timeout_s >= 0 && timeout_s < kLongestS) {
      const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - begin;
      left_ns = static_cast<std::int64_t>((timeout_s - waited.count()) * 1e9);
      if (left_ns <= 0) {
        return 0;
      }
    }
    LedgerLock::Wait ended;
    {
      const GilReleased released;
      ended = self->lock.wait_free(left_ns);
    }
    if (ended == LedgerLock::Wait::kSignal && PyErr_CheckSignals() != 0) {
      return -1;
    }
  }
  return 1;
}

int take(LockObject* self, double timeout_s) {
  const unsigned long me = PyThread_get_thread_ident();
  if (!self->lock.try_lock()) {
    if (self->holder == me) {
      PyErr_SetString(PyExc_RuntimeError,
                      "this thread has the ledger's lock already; it would wait for itself for ever");
      return -1;
    }
    if (timeout_s == 0) {
      return 0;
    }
    if (const int taken = wait_and_take(self, timeout_s); taken != 1) {
      return taken;
    }
  }
  self->holder = me;
  return 1;
}

PyObject* give_back(LockObject* self) {
  if (self->holder != PyThread_get_thread_ident()) {
    PyErr_SetString(PyExc_RuntimeError, "this thread has not got the ledger's lock, so it cannot give it back");
    return nullptr;
  }
  self->holder = 0;
  self->lock.unlock();
  Py_RETURN_NONE;
}

PyObject* as_bool(int taken) { return taken < 0 ? nullptr : PyBool_FromLong(taken); }

PyObject* lock_enter(PyObject* self, PyObject*) { return as_bool(take(as_lock(self), -1)); }

PyObject* lock_exit(PyObject* self, PyObject* const*, Py_ssize_t) { return give_back(as_lock(self)); }

PyObject* lock_acquire(PyObject* self, PyObject* arguments, PyObject* named) {
  static const char* const names[] = {"blocking", "timeout", nullptr};
  int blocking = 1;
  double timeout_s = -1;
  if (PyArg_ParseTupleAndKeywords(arguments, named, "|pd:acquire", const_cast<char**>(names), &blocking, &timeout_s) ==
      0) {
    return nullptr;
  }
  if (std::isnan(timeout_s) || (timeout_s < 0 && timeout_s != -1)) {
    PyErr_SetString(PyExc_ValueError, "timeout is below 0; give seconds, or -1 to wait for ever");
    return nullptr;
  }
  return as_bool(take(as_lock(self), blocking == 0 ? 0 : timeout_s));
}

PyObject* lock_release(PyObject* self, PyObject*) { return give_back(as_lock(self)); }

PyObject* lock_locked(PyObject* self, PyObject*) { return PyBool_FromLong(as_lock(self)->lock.is_locked() ? 1 : 0); }

PyObject* lock_after_fork(PyObject* self, PyObject*) {
  as_lock(self)->holder = 0;
  as_lock(self)->lock.reinitialise();
  Py_RETURN_NONE;
}

PyObject* lock_new(PyTypeObject* type, PyObject* arguments, PyObject* named) {
  static const char* const names[] = {nullptr};
  if (PyArg_ParseTupleAndKeywords(arguments, named, ":LedgerLock", const_cast<char**>(names)) == 0) {
    return nullptr;
  }
  const auto alloc = reinterpret_cast<allocfunc>(PyType_GetSlot(type, Py_tp_alloc));
  PyObject* const made = alloc(type, 0);
  if (made != nullptr) {
    new (&as_lock(made)->lock) LedgerLock;
    as_lock(made)->holder = 0;
  }
  return made;
}

void lock_dealloc(PyObject* self) {
  PyTypeObject* const type = Py_TYPE(self);
  const auto free = reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free));
  free(self);
  Py_DECREF(reinterpret_cast<PyObject*>(type));
}

template <class Function>
PyCFunction method(Function function) noexcept {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyMethodDef lock_methods[] = {
    {"__enter__", method(lock_enter), METH_NOARGS, "Take it."},
    {"__exit__", method(lock_exit), METH_FASTCALL, "Give it back."},
    {"acquire", method(lock_acquire), METH_VARARGS | METH_KEYWORDS, "Take it; whether that was so in time."},
    {"release", method(lock_release), METH_NOARGS, "Give it back."},
    {"locked", method(lock_locked), METH_NOARGS, "Whether somebody has it."},
    {"_at_fork_reinit", method(lock_after_fork), METH_NOARGS, "In a forked child: free, whoever had it."},
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot lock_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(lock_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(lock_dealloc)},
    {Py_tp_methods, lock_methods},
    {Py_tp_doc, const_cast<char*>("The lock around a ledger, which threads that never have the GIL take too.")},
    {0, nullptr},
};

PyType_Spec lock_spec = {"kvbm._native.LedgerLock", sizeof(LockObject), 0, Py_TPFLAGS_DEFAULT, lock_slots};

}  // namespace

LedgerLock& ledger_lock_of(nb::handle object) {
  if (Py_TYPE(object.ptr()) != lock_type) {
    throw nb::type_error("the lock is no kvbm._native.LedgerLock");
  }
  return as_lock(object.ptr())->lock;
}

void bind_ledger_lock(nb::module_& module) {
  PyObject* const type = PyType_FromSpec(&lock_spec);
  if (type == nullptr) {
    throw nb::python_error();
  }
  lock_type = reinterpret_cast<PyTypeObject*>(type);
  module.attr("LedgerLock") = nb::borrow(type);
}

}  // namespace kvbm::bindings
