// What the roles mark on their timeline (attn/timeline.cuh): a mark is the beginning of a state,
// which lasts until the role's next mark. Read by python/attnscope/timeline/layout.py.
#pragma once

#include "attn/timeline.cuh"

namespace attnscope::sm90 {

struct Lane {
  enum : int {
    kScheduler,
    kProducer,
    kQueries,
    kConsumer
  };  // and one more for each further consumer
};

struct SchedulerTile {
  enum Mark : int {
    kAwaitRequest,  // the producer has not asked for it yet
    kTake,          // takes its number from the counter
    kAwaitSlot,     // the consumers still read the one two before
    kHand,          // works out what it is and writes it down; those without keys it does itself
    // What it is.
    kHead = 8,
    kBatch,
    kFirstRow,
    kBegin,
    kEnd,
    kFullBegin,
    kFullEnd,
    kEndRow,
  };
};

struct ProducerTile {
  enum Mark : int { kAwaitTile };
};

struct ProducerStep {
  enum Mark : int { kAwaitKSlot, kIssueK, kAwaitVSlot, kIssueV };
};

struct QueriesTile {
  enum Mark : int {
    kAwaitTile,
    kAwaitSlot,  // the first consumer is not done with its rows of the tile before
    kIssue,      // to that one, then to the others as they are done
  };
};

// The first block of a consumer's own has no products to run under and the last P V no softmax:
// both belong to the tile, as do the blocks that only other consumers' rows see. Steps are its own
// blocks after the first. A consumer without any marks nothing from kAwaitK to kAwaitOutput.
struct ConsumerTile {
  enum Mark : int {
    kAwaitTile,
    kPrepare,
    kAwaitQ,
    kSkipFirst,  // blocks before its own
    kAwaitK,
    kIssueScores,
    kAwaitScores,
    kSoftmax,
    kAwaitNextK,
    kAwaitLastV,
    kIssueOutput,
    kAwaitOutput,
    kSkipLast,  // blocks after its own
    kEpilogue,
  };
};

struct ConsumerStep {
  enum Mark : int {
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
