// The turns of the Hopper backward's key blocks (turns.cuh), by its own functions: a warp describes
// the tiles in the order of their numbers. Nobody may have to wait, since a tile may wait only for
// tiles of lower numbers. And each turn must be the number of tiles that have added before: with a
// lower ticket it would wait. The first one in turn, and no other, stores its part of dQ. Where
// turns ascend, tiles come longest first and go through their blocks backwards. Without turns,
// tiles that see the same blocks start at different ones. Parts of a tile (parts.cuh) have each of
// its blocks once, or each of its query heads.
#include "emulator.h"
#include "kernels/sm90_backward/parts.cuh"
#include "kernels/sm90_backward/tile_list.cuh"
#include "kernels/sm90_backward/tiles.cuh"
#include "kernels/sm90_backward/turns.cuh"

using namespace attnscope;
using namespace attnscope::sm90;

namespace {

template <int kRows, int kKeys, int kWarpgroups, bool kToEnd = false, int kRanks = 1>
struct TileConfig {
  static constexpr int kBlockM = kRows, kBlockN = kKeys, kConsumers = kWarpgroups, kAdders = kRanks;
  static constexpr bool kSeenToEnd = kToEnd, kParts = true;
};

struct Call {
  int batch = 1, heads_kv = 2, seqlen_q = 0, seqlen_k = 0, left = -1, right = -1;
  std::vector<int32_t> cu_q, cu_k;  // packed
};

// How half of the tiles of a call are shared out, or all of them if parts have heads.
struct Shares {
  int parts = 1, group = 1;  // query heads of a key head
  bool have_heads = false;
};

long g_turns, g_parts, g_heads, g_ascending, g_ascending_packed, g_listed;
int g_loads;  // of a ticket

int blocks_of(int rows, int block) { return (rows + block - 1) / block; }

// The parts of a tile must have its blocks in order, each once. Parts without blocks have no rows,
// but for the first one of a tile that no query sees: its keys are cleared.
template <class Config>
const char* check_parts(const BackwardArguments& a) {
  const char* wrong = nullptr;
  KeyTile whole, t;
  emulator::launch(1, 32, 1, [&] {
    const int tiles = a.order.tiles();
    for (int split = 0; split < tiles - a.whole_tiles; ++split) {
      const int first = a.whole_tiles + split * a.parts.divisor;
      const Tile tile = find_tile(a, a.whole_tiles + split);
      describe_tile<Config>(a, tile.head, tile.m_block, whole);
      __syncwarp();
      int end = whole.begin;
      for (int part = 0; part < a.parts.divisor; ++part) {
        describe_unit<Config>(a, first + part, 0, t);
        __syncwarp();
        if (threadIdx.x == 0) {
          const bool clears = part == 0 && whole.begin >= whole.end;
          const bool has_steps = t.begin < t.end;
          if (t.split != split || t.part != part || t.key_block != whole.key_block) {
            wrong = "a part is of another tile";
          }
          if (t.rows != (has_steps || clears ? whole.rows : 0)) wrong = "rows of a part";
          if (has_steps && t.begin != end) wrong = "parts do not follow each other";
          if (has_steps) end = t.end;
          g_parts += has_steps;
        }
        __syncwarp();
      }
      if (threadIdx.x == 0 && end != std::max(whole.end, whole.begin))
        wrong = "blocks are left out";
      __syncwarp();
    }
  });
  return wrong;
}

// Each query head and block of a tile must be in one part, and the parts' numbers of their tile
// must lead to it again.
template <class Config>
const char* check_heads(const BackwardArguments& a) {
  const char* wrong = nullptr;
  std::vector<int> seen(a.order.tiles() / a.parts.divisor * a.group);
  KeyTile t, again;
  emulator::launch(1, 32, 1, [&] {
    for (int unit = 0; unit < a.order.tiles(); ++unit) {
      describe_unit<Config>(a, unit, 0, t);
      __syncwarp();
      const bool clears = t.begin >= t.end && t.part > 0;
      describe_tile<Config>(a, t.split / a.order.m_blocks, t.split % a.order.m_blocks, again);
      __syncwarp();
      if (threadIdx.x == 0) {
        const int first = t.head_kv * a.group;
        if (t.head_kv != again.head_kv || t.k_row != again.k_row || t.batch != again.batch ||
            t.rows != (clears ? 0 : again.rows) || t.begin != again.begin || t.end != again.end) {
          wrong = "a part is of another tile";
        }
        if (t.first_head >= t.end_head) wrong = "a part has no heads";
        for (int head = t.first_head; head < t.end_head; ++head) {
          if (head < first || head >= first + a.group) wrong = "a head of another tile";
          if (seen.at(t.split * a.group + head - first)++ > 0) wrong = "two parts have a head";
          ++g_heads;
        }
      }
      __syncwarp();
    }
  });
  for (const int count : seen) wrong = count == 0 ? "a head is left out" : wrong;
  return wrong;
}

// Whether all roles go through the blocks of a tile as the producer does: the wide consumers block
// by block, the narrow ones with a loop for each direction.
bool have_one_order(const KeyTile& t) {
  BlockOrder wide(t.begin, t.end, t.start, t.end_forward - t.first_head), narrow = wide;
  int left = narrow.left(), place = t.start;
  for (int head = t.first_head; head < t.end_head; ++head) {
    for (int i = t.begin; i < t.end; ++i, place = t.place_after(place)) {
      const int block = t.block_at(place, head);
      if (block != wide.block || block != narrow.block) return false;
      wide.advance();
      narrow.block += narrow.direction;
      if (--left > 0) continue;
      narrow.turn_around();
      left = narrow.left();
    }
  }
  return true;
}

// The message of what is wrong, or null. `section`: see TileOrder.
template <class Config>
const char* check(const Call& c, int section, const Shares& shares, bool alternates) {
  const int parts = shares.parts, heads_q = c.heads_kv * shares.group;
  const bool packed = !c.cu_q.empty();
  int counter[2] = {};
  BackwardArguments a{};
  ForwardParams& p = a.params.forward;
  p.batch = c.batch;
  p.seqlen_q = c.seqlen_q;
  p.seqlen_k = c.seqlen_k;
  p.heads_q = heads_q;
  p.heads_kv = c.heads_kv;
  p.window_left = c.left;
  p.window_right = c.right;
  p.cu_seqlens_q = packed ? c.cu_q.data() : nullptr;
  p.cu_seqlens_k = packed ? c.cu_k.data() : nullptr;
  p.total_q = packed ? c.cu_q.back() : int64_t{c.batch} * c.seqlen_q;
  p.total_k = packed ? c.cu_k.back() : int64_t{c.batch} * c.seqlen_k;
  a.packed = packed;
  a.group = shares.group;
  a.parts_have_heads = shares.have_heads;
  a.counter = counter;
  a.heads_kv = Divisor::of(c.heads_kv);
  a.query_blocks = block_count(packed, p.total_q, c.seqlen_q, c.batch, Config::kBlockM);
  a.dense_queries = Divisor::of(std::max(blocks_of(c.seqlen_q, Config::kBlockM), 1));
  const int key_blocks = block_count(packed, p.total_k, c.seqlen_k, c.batch, Config::kBlockN);
  const int heads = c.heads_kv * (packed ? 1 : c.batch) * (shares.have_heads ? shares.parts : 1);
  a.order = {packed ? key_blocks : blocks_of(c.seqlen_k, Config::kBlockN), heads, section, 0};
  int ticket = 0;
  a.tickets = &ticket;
  a.alternates = alternates;
  std::vector<Tile> list(a.order.tiles());
  if (packed && alternates) a.tile_list = list.data();
  a.slots = section * 7;  // sections of few heads, or of all
  const int tiles = key_blocks * c.heads_kv;
  a.whole_tiles = shares.have_heads ? 0 : parts > 1 ? tiles / 2 : tiles;
  a.parts = Divisor::of(parts);
  const int units = a.whole_tiles + (tiles - a.whole_tiles) * parts;
  // As the scheduler does.
  const auto describe = [&](int index, KeyTile& t) {
    describe_unit<Config>(a, index, 0, t);
    __syncwarp();
  };

  std::vector<int> added(static_cast<size_t>(heads_q) * a.query_blocks), stored(added.size());
  const char* wrong = nullptr;
  int64_t rows = 0;  // of all tiles and parts
  KeyTile t;
  // Lists the tiles. They come from the longest sequences first, but for a block on its border.
  const auto list_all = [&] {
    emulator::launch(2, 32, 1, [&] { list_tiles(a, Config::kBlockN); });
    int before = INT_MAX - 1;
    emulator::launch(1, 32, 1, [&] {
      for (int index = 0; index < units; ++index) {
        describe(index, t);
        if (threadIdx.x == 0 && t.rows > 0) {
          const int blocks = blocks_of(t.seqlen_k, Config::kBlockN);
          if (blocks > before + 1) wrong = "a longer sequence comes later";
          before = blocks;
        }
        __syncwarp();
      }
    });
  };
  if (a.tile_list != nullptr) list_all();
  emulator::launch(1, 32, 1, [&] {
    for (int index = 0; index < units; ++index) {
      describe(index, t);
      if (threadIdx.x == 0 && t.begin < t.end) rows += t.rows;
      const int key_head = (packed ? 0 : t.batch * c.heads_kv) + t.head_kv;
      const int order_head = shares.have_heads ? key_head * parts + t.part : key_head;
      const bool ascends = packed ? t.direction < 0 : alternates && order_head / section % 2 != 0;
      if (ascends && !alternates) wrong = "turns of a call go both ways";
      const bool is_causal = c.left < 0 && c.right >= 0;
      if (threadIdx.x == 0 && t.rows > 0 && !have_one_order(t)) wrong = "roles have other blocks";
      for (int head = t.first_head; threadIdx.x == 0 && t.rows > 0 && head < t.end_head; ++head) {
        if (t.direction != (ascends ? -1 : 1)) wrong = "turns of a section go the other way";
        const bool is_forward =
            !is_causal || (ascends ? head + 1 < t.end_head : head == t.first_head);
        int next = is_forward ? t.begin : t.end - 1, n = t.start;
        for (int i = t.begin; i < t.end; ++i, n = t.place_after(n)) {
          const int block = t.block_at(n, head);
          if (block != next) wrong = "blocks are out of order";
          next += is_forward ? 1 : -1;
          const int place = head * a.query_blocks + t.first_block + block;
          const bool is_first = Turns<Config>::number(a, t, block) == 0;
          if (is_first != (stored.at(place)++ == 0))
            wrong = "another than the first part is stored";
          const auto waits = [&](int value) {
            ticket = value;
            g_loads = 0;
            Turns<Config>::await(a, t, 0, block);
            return g_loads > 1;
          };
          int& count = added.at(place);
          if (waits(count * Config::kAdders)) wrong = "a tile waits for one of a higher number";
          if (!waits(count * Config::kAdders - 1)) wrong = "a tile does not wait for one before it";
          ++count;
          ++g_turns;
          g_ascending += ascends;
          g_ascending_packed += ascends && packed;
        }
        if (t.begin < t.end && n != t.start) wrong = "the next head starts at another block";
      }
      __syncwarp();
    }
  });
  if (wrong != nullptr) return wrong;
  const auto check_shares = shares.have_heads ? check_heads<Config> : check_parts<Config>;
  if (const char* of_parts = check_shares(a); of_parts != nullptr) return of_parts;

  a.tickets = nullptr;
  a.alternates = false;
  a.tile_list = nullptr;
  if (const char* of_parts = check_shares(a); of_parts != nullptr) return of_parts;
  const bool is_full = c.left < 0 && c.right < 0, has_room = packed || c.seqlen_q >= c.seqlen_k;
  std::vector<int> starts(added.size());
  int64_t rows_now = 0;
  const auto start_all = [&] {
    for (int index = 0; index < units; ++index) {
      describe(index, t);
      if (threadIdx.x == 0 && t.begin < t.end) rows_now += t.rows;
      if (threadIdx.x == 0 && t.rows > 0 && t.begin < t.end) {
        if (t.start < t.begin || t.start >= t.end) wrong = "a tile starts outside of its blocks";
        if (!have_one_order(t)) wrong = "roles have other blocks, without turns";
        if (c.right >= 0 && t.start != t.begin) wrong = "a masked tile does not start at its first";
        int& count = starts.at(t.first_head * a.query_blocks + t.first_block + t.start);
        if (is_full && has_room && parts == 1 && t.seqlen_q >= t.seqlen_k && count++ > 0) {
          wrong = "two tiles start at the same block";
        }
      }
      __syncwarp();
    }
  };
  emulator::launch(1, 32, 1, start_all);
  const bool parts_alike = parts == 1 || shares.have_heads;  // turns change which tiles come last
  if (parts_alike && rows != rows_now && wrong == nullptr) wrong = "with turns, other tiles come";
  if (packed && parts_alike && wrong == nullptr) {
    a.tile_list = list.data();
    std::fill(list.begin(), list.end(), Tile{});
    std::fill(starts.begin(), starts.end(), 0);
    rows_now = 0;
    list_all();
    emulator::launch(1, 32, 1, start_all);
    if (rows != rows_now && wrong == nullptr) wrong = "the list has other tiles";
    g_listed += units;
  }
  return wrong;
}

const char* check_all(const Call& c) {
  const bool packed = !c.cu_q.empty();
  const int heads = c.heads_kv * (packed ? 1 : c.batch);
  const auto check_rows = [&](int section, const Shares& shares, bool alternates) {
    const char* wrong = check<TileConfig<64, 192, 3>>(c, section, shares, alternates);
    if (wrong == nullptr) {
      wrong = check<TileConfig<64, 128, 2, false, 2>>(c, section, shares, alternates);
    }
    if (wrong == nullptr) wrong = check<TileConfig<128, 128, 2>>(c, section, shares, alternates);
    if (wrong == nullptr && c.left < 0) {
      wrong = check<TileConfig<80, 128, 2, true>>(c, section, shares, alternates);
    }
    return wrong;
  };
  const Shares all_shares[] = {{}, {2}, {5}, {2, 2, true}, {2, 3, true}};
  for (const int section : {1, 2, heads}) {
    if (section > heads) continue;
    for (const Shares& shares : all_shares) {
      if (packed && shares.parts > 1 && !shares.have_heads) continue;  // they have none
      const char* wrong = check_rows(section, shares, false);
      // Calls that alternate have no left window. Their parts have heads.
      const bool may_alternate = shares.parts == 1 || shares.have_heads;
      if (wrong == nullptr && may_alternate && c.left < 0 && c.right >= 0) {
        wrong = check_rows(section, shares, true);
      }
      if (wrong != nullptr) return wrong;
    }
  }
  return nullptr;
}

}  // namespace

int main() {
  emulator::shared = static_cast<char*>(std::malloc(emulator::kSharedBytes));
  ptx::on_load_acquire = [](const int* ticket) { return ++g_loads > 1 ? INT_MAX : *ticket; };
  const int windows[][2] = {{-1, -1}, {-1, 0}, {0, 0}, {100, 30}, {40, 0}, {-1, 200}, {150, -1}};
  const int lengths[][2] = {{1, 1}, {65, 700}, {700, 300}, {513, 513}, {1, 1000}, {130, 129}};
  for (const auto& [left, right] : windows) {
    Call packed{.batch = 0, .left = left, .right = right, .cu_q = {0}, .cu_k = {0}};
    for (const auto& [queries, keys] : lengths) {
      Call c{.batch = 2, .seqlen_q = queries, .seqlen_k = keys, .left = left, .right = right};
      if (const char* wrong = check_all(c); wrong != nullptr) {
        std::printf("%d queries, %d keys, window %d %d: %s\n", queries, keys, left, right, wrong);
        return 1;
      }
      packed.cu_q.push_back(packed.cu_q.back() + queries);
      packed.cu_k.push_back(packed.cu_k.back() + keys);
      // Sequences without queries, or without keys.
      packed.cu_q.push_back(packed.cu_q.back() + (keys % 2) * 7);
      packed.cu_k.push_back(packed.cu_k.back() + (1 - keys % 2) * 9);
    }
    packed.batch = static_cast<int>(packed.cu_q.size()) - 1;
    for (const int longest : {1000, 300}) {  // rows past 300 belong to no sequence
      packed.seqlen_q = packed.seqlen_k = longest;
      if (const char* wrong = check_all(packed); wrong != nullptr) {
        std::printf("packed, window %d %d: %s\n", left, right, wrong);
        return 1;
      }
    }
  }
  std::printf("%ld turns in order, %ld of them ascending, %ld in packed calls; ", g_turns,
              g_ascending, g_ascending_packed);
  std::printf("%ld parts, %ld heads of parts; %ld tiles listed\n", g_parts, g_heads, g_listed);
}
