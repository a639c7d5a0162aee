// The marks that the roles of backward_kernel write to their timeline (attn/timeline.cuh). A mark
// begins a state, which lasts until the role's next mark. Reader:
// python/attnscope/timeline/backward.py.
#pragma once

#include "attn/timeline.cuh"

namespace attnscope::sm90 {

struct BackwardLane {
  enum : int { kScheduler, kProducer, kWriter, kConsumer = 4 };  // one for each writer, consumer
};

struct BackwardSchedulerTile {
  enum Mark : int {
    kAwaitSlot,     // until all roles release the tile two before
    kHand,          // computes the description and writes it
    kAwaitRequest,  // until the producer has issued the tile's loads
    kTake,          // takes the next number from the counter; clears keys that no query sees
    // The description.
    kFirstHead = 8,
    kEndHead,
    kBatch,
    kFirstKey,
    kBegin,
    kEnd,
    kStart,
    kRows,
  };
};

// With one buffer for K it is loaded in the first step of a tile.
struct BackwardProducerTile {
  enum Mark : int { kAwaitTile, kAwaitKSlot, kIssueK, kAwaitVSlot, kIssueV };
};

struct BackwardProducerStep {
  enum Mark : int { kAwaitSlot, kIssueQ, kIssueDout, kAwaitKSlot, kIssueK };
};

struct BackwardWriterTile {
  enum Mark : int { kAwaitTile };
};

struct BackwardWriterStep {
  enum Mark : int {
    kAwaitGradient,  // until the consumers have staged dQ; reads the claim
    kClaim,          // takes a number, and waits for the first part
    kIssue,          // the TMA store or addition
    kAwaitRead,      // until TMA has read the buffer; of whole heads until it has written dQ
    kPublish,        // of a first part: waits until it is stored, marks the claim
  };
};

// With kStoresByTma the end of a tile is kStore alone, and the warps meet in kAwaitK.
struct BackwardConsumerTile {
  enum Mark : int {
    kAwaitTile,
    kAwaitK,
    kAwaitScoreSlot,  // after the last step
    kStore,           // dV and dK, and waits until TMA has read dV; of whole heads dQ
    kSync,            // the consumer's warps meet
  };
};

// A step that the consumer passes over marks kPassOver in place of the states before kAwaitOthers.
// Steps without this consumer's turn at dQ mark nothing from kAwaitOthers on.
struct BackwardConsumerStep {
  enum Mark : int {
    kAwaitOperands,
    kIssueScores,  // S and dP; passes dQ of the step before on
    kAwaitScores,
    kProbabilities,
    kIssueValues,  // dV, where it comes before dS
    kAwaitDp,
    kScoreGradients,  // and dS to shared memory
    kIssueKeys,       // dK; dV where it comes after dS; the fence; passes dS on
    kAwaitProducts,
    kPassOver,
    kAwaitOthers,  // dS of the other consumers
    kIssueGradient,
    kAwaitGradientSlot,
    kAwaitGradient,
    kStageGradient,
  };
};

}  // namespace attnscope::sm90
