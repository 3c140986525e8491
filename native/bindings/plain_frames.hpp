// Runs of plain frames as Python gives them, applied in place or by a thread. GIL held.
#pragma once

#include <memory>
#include <vector>

#include "frames.hpp"
#include "kvbm/plain_frames.hpp"
#include "python.hpp"

namespace kvbm::bindings {

// The classes of kvbm.catalog.index.cluster_index, found when first used: the catalog is not imported by an engine.
class PlainClasses {
 public:
  PlainClasses();

  nb::object made(const PlainApplied& applied, const std::vector<StreamPlace>& places) const;

 private:
  const SharedClasses frames_;  // of tiers
  const nb::object applied_;    // PlainApplied
  const nb::object reached_;    // PlaceReached
  const nb::object said_;       // PlainClaims
  const nb::object claims_;     // Claims of kvbm.catalog.index.cluster_index
};

// One run: (place, data) of each message, and (instance, epoch, offset) of each place. Keeps the messages' bytes.
class PlainRun {
 public:
  PlainRun(const ClusterIndex& index, const nb::list& messages, const nb::list& places);

  std::vector<StreamMessage> messages;  // point into `kept_`
  std::vector<StreamPlace> places;      // moved on by the run

 private:
  const nb::list kept_;  // the messages
};

class PythonApplyThread {
 public:
  explicit PythonApplyThread(ClusterIndex& index) : index_(index), thread_(index) {}

  int fileno() const noexcept { return thread_.ended_file(); }
  void begin(const nb::list& messages, const nb::list& places);
  nb::object finish();
  void close();

 private:
  ClusterIndex& index_;            // what runs are applied to
  const PlainClasses classes_;     // what answers are made of
  std::unique_ptr<PlainRun> run_;  // under way
  ApplyThread thread_;             // last: it uses the run
};

}  // namespace kvbm::bindings
