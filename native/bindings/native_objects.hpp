// What Python objects of kvbm._native are in the core, for those that work with them without the GIL. GIL held; each
// lives as long as its object. Throws a Python TypeError: the object is another.
#pragma once

#include <memory>

#include "kvbm/block_io.hpp"
#include "kvbm/ledger.hpp"
#include "kvbm/ledger_lock.hpp"
#include "kvbm/peer_tls.hpp"
#include "python.hpp"

namespace kvbm::bindings {

Ledger& ledger_of(nb::handle object);
LedgerLock& ledger_lock_of(nb::handle object);
BlockIo& block_io_of(nb::handle object);
// nullptr: the object is None.
std::shared_ptr<PeerTls> peer_tls_of(nb::handle object);

}  // namespace kvbm::bindings
