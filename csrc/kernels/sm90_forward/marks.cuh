// The marks that the roles write to their timeline (attn/timeline.cuh). A mark begins a state,
// which lasts until the role's next mark. Reader: python/attnscope/timeline/layout.py.
#pragma once

#include "attn/timeline.cuh"

namespace attnscope::sm90 {

struct Lane {
  enum : int { kScheduler, kProducer, kQueries, kConsumer };  // one lane for each consumer
};

struct SchedulerTile {
  enum Mark : int {
    kAwaitRequest,  // until the producer asks for the tile
    kTake,          // takes the tile's number from the counter
    kAwaitSlot,     // until all roles release the tile two before
    kHand,          // computes the description and writes it; stores tiles without keys
    // The description.
    kHead = 8,
    kBatch,
    kFirstUnit,
    kBegin,
    kEnd,
    kFullBegin,
    kFullEnd,
    kEndUnit,
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
    kAwaitSlot,  // until the first consumer releases its rows of the tile before
    kIssue,      // loads for the first consumer, then for each as it releases its rows
  };
};

// Steps are a consumer's blocks after its first. The first block (a softmax without a P V to
// overlap with), the last P V (without a softmax) and the blocks that only other consumers' rows
// see are states of the tile. A consumer that sees no block marks nothing from kAwaitK to
// kAwaitOutput.
struct ConsumerTile {
  enum Mark : int {
    kAwaitTile,
    kPrepare,
    kAwaitQ,
    kSkipFirst,  // releases blocks before its first, unread
    kAwaitK,
    kIssueScores,
    kAwaitScores,
    kSoftmax,
    kAwaitNextK,
    kAwaitLastV,
    kIssueOutput,
    kAwaitOutput,
    kSkipLast,  // releases blocks after its last, unread
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
    kRaiseMaximum,  // only if the row max rises; where sums are looked at late, after kAwaitK
    kAwaitK,
    kAwaitOutput,
    kRescale,  // also releases the V buffer and packs P
  };
};

}  // namespace attnscope::sm90
