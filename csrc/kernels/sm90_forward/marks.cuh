// What the roles mark on their timeline (attn/timeline.cuh): a mark is the beginning of a state,
// which lasts until the role's next mark. Read by python/attnscope/timeline/layout.py.
#pragma once

#include "attn/timeline.cuh"

namespace attnscope::sm90 {

struct Lane {
  enum : int { kScheduler, kProducer, kConsumer };  // and one more for each further consumer
};

struct SchedulerTile {
  enum : int {
    kAwaitRequest,  // the producer has not asked for it yet
    kTake,          // takes one from the counter and works out what it is
    kAwaitSlot,     // the consumers still read the one two before
    kHand,          // writes it down for the others
    // What it is.
    kHead = 8,
    kBatch,
    kFirstRow,
    kBegin,
    kEnd,
    kFullBegin,
    kFullEnd,
  };
};

struct ProducerTile {
  enum : int { kAwaitTile, kAwaitQSlot, kIssueQ };
};

struct ProducerStep {
  enum : int { kAwaitKSlot, kIssueK, kAwaitVSlot, kIssueV };
};

// The first block of keys has no products to run under and the last P V no softmax: both belong to
// the tile. Steps are the blocks after the first.
struct ConsumerTile {
  enum : int {
    kAwaitTile,
    kPrepare,
    kAwaitQ,
    kAwaitK,
    kIssueScores,
    kAwaitScores,
    kSoftmax,
    kAwaitV,
    kAwaitNextK,
    kAwaitLastV,
    kIssueOutput,
    kAwaitOutput,
    kEpilogue,
    kSkipFirst,  // blocks that other consumers' rows see: those before its own,
    kSkipLast,   // those after
  };
};

struct ConsumerStep {
  enum : int {
    kAwaitTurn,
    kIssueScores,
    kAwaitV,
    kIssueOutput,
    kAwaitScores,
    kSoftmax,
    kRaiseMaximum,  // only where it rises
    kAwaitK,
    kAwaitOutput,
    kRescale,  // and gives the V slot back, packs P
  };
};

}  // namespace attnscope::sm90
