/* The inner loops of the delta codecs: find what changed, pack it into bit planes, and the way back.

   Every function is given lengths and stays inside them; what a caller read from the network is checked here
   before it is used as an index. Results are those of the numpy code in rice.py and context.py, bit for bit.
   The widest instructions that the processor has are chosen at the first call; `af_use` overrides that. */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__)
#define HAVE_X86 1
#include <immintrin.h>
#endif

enum { ABI = 2, BLOCK = 64, CLASSES = 16, CHUNK_BLOCKS = 128, AHEAD = 4096 };
enum { SCALAR = 0, AVX2 = 1, AVX512 = 2 };
enum { OK = 0, CUT_SHORT = -1, LEFT_OVER = -2, OUT_OF_RANGE = -3, NO_ROOM = -4 };

static int chosen = -1;

static int best_isa(void) {
#ifdef HAVE_X86
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("bmi2")) return SCALAR;
  if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vpopcntdq")) return AVX512;
  return AVX2;
#else
  return SCALAR;
#endif
}

/* Work on a block takes about as long as fetching one from memory; asked for this early, both run side by side.
   An address behind the end is only a hint that is not taken. */
static inline void fetch_ahead(const uint16_t *block) {
  for (int line = 0; line < BLOCK; line += 32) __builtin_prefetch((const void *)((uintptr_t)(block + line) + 2 * AHEAD));
}

static int isa(void) {
  if (chosen < 0) chosen = best_isa();
  return chosen;
}

int af_abi(void) { return ABI; }

int af_isa(void) { return isa(); }

/* Uses at most `wanted`; returns what is used from now on. */
int af_use(int wanted) {
  int best = best_isa();
  chosen = wanted < best ? wanted : best;
  return chosen;
}

/* ------------------------------------------------------------------ which elements of a block changed */

static inline uint64_t changed_scalar(const uint16_t *a, const uint16_t *b) {
  uint64_t mask = 0;
  for (int word = 0; word < BLOCK / 4; word++) {
    uint64_t x, y;
    memcpy(&x, a + 4 * word, 8);
    memcpy(&y, b + 4 * word, 8);
    if (x == y) continue;
    for (int i = 4 * word; i < 4 * word + 4; i++) mask |= (uint64_t)(a[i] != b[i]) << i;
  }
  return mask;
}

static inline unsigned class_of(uint16_t bits, unsigned first_exponent) {
  unsigned exponent = (bits >> 7) & 0xff;
  if (exponent <= first_exponent) return 0;
  unsigned distance = exponent - first_exponent;
  return distance < CLASSES - 1 ? distance : CLASSES - 1;
}

/* The members of each class in a block of 64, as masks: what the four bits of a class select. */
static inline void members_scalar(const uint16_t *bits, unsigned first_exponent, uint64_t *members) {
  uint8_t classes[BLOCK];
  uint64_t plane[4] = {0}, lower[4], upper[4];
  const int16_t first = (int16_t)first_exponent;
  for (int i = 0; i < BLOCK; i++) { /* numbers of 16 bits with a sign: compilers find instructions for many at once */
    int16_t distance = (int16_t)((int16_t)((bits[i] >> 7) & 0xff) - first);
    distance = distance > 0 ? distance : 0;
    classes[i] = (uint8_t)(distance < CLASSES - 1 ? distance : CLASSES - 1);
  }
  for (int at = 0; at < BLOCK; at += 8) {
    uint64_t word;
    memcpy(&word, classes + at, 8);
    /* One bit of each of eight bytes is gathered in the top byte of a product. */
    for (int bit = 0; bit < 4; bit++) {
      uint64_t chosen = (word >> bit) & 0x0101010101010101ull;
      plane[bit] |= ((chosen * 0x0102040810204080ull) >> 56) << at;
    }
  }
  for (int c = 0; c < 4; c++) {
    lower[c] = (c & 1 ? plane[0] : ~plane[0]) & (c & 2 ? plane[1] : ~plane[1]);
    upper[c] = (c & 1 ? plane[2] : ~plane[2]) & (c & 2 ? plane[3] : ~plane[3]);
  }
  for (int c = 0; c < CLASSES; c++) members[c] = lower[c & 3] & upper[c >> 2];
}

/* Adds the number of members to each class's counter. Written out, for not every processor has an instruction. */
static inline void count_scalar(const uint64_t *members, uint32_t *seen) {
  for (int c = 0; c < CLASSES; c++) {
    uint64_t x = members[c];
    x -= (x >> 1) & 0x5555555555555555ull;
    x = (x & 0x3333333333333333ull) + ((x >> 2) & 0x3333333333333333ull);
    x = (x + (x >> 4)) & 0x0f0f0f0f0f0f0f0full;
    seen[c] += (uint32_t)((x * 0x0101010101010101ull) >> 56);
  }
}

/* Place of the set bit of that number, counted from 0. */
static inline unsigned place_scalar(uint64_t mask, unsigned number) {
  for (; number; number--) mask &= mask - 1;
  return (unsigned)__builtin_ctzll(mask);
}

#ifdef HAVE_X86
#define TARGET_AVX2 __attribute__((target("avx2,bmi,bmi2,popcnt,lzcnt")))
#define TARGET_AVX512 __attribute__((target("avx512f,avx512bw,avx512vpopcntdq,avx2,bmi,bmi2,popcnt,lzcnt")))

TARGET_AVX2 static inline uint32_t equal32_avx2(const uint16_t *a, const uint16_t *b) {
  __m256i low = _mm256_cmpeq_epi16(_mm256_loadu_si256((const __m256i *)a), _mm256_loadu_si256((const __m256i *)b));
  __m256i high = _mm256_cmpeq_epi16(_mm256_loadu_si256((const __m256i *)(a + 16)),
                                    _mm256_loadu_si256((const __m256i *)(b + 16)));
  __m256i bytes = _mm256_permute4x64_epi64(_mm256_packs_epi16(low, high), 0xd8);
  return (uint32_t)_mm256_movemask_epi8(bytes);
}

TARGET_AVX2 static inline uint64_t changed_avx2(const uint16_t *a, const uint16_t *b) {
  return ~(((uint64_t)equal32_avx2(a + 32, b + 32) << 32) | equal32_avx2(a, b));
}

TARGET_AVX512 static inline uint64_t changed_avx512(const uint16_t *a, const uint16_t *b) {
  uint32_t low = _mm512_cmpneq_epu16_mask(_mm512_loadu_si512(a), _mm512_loadu_si512(b));
  uint32_t high = _mm512_cmpneq_epu16_mask(_mm512_loadu_si512(a + 32), _mm512_loadu_si512(b + 32));
  return ((uint64_t)high << 32) | low;
}

/* Classes of 32 elements as bytes, in order. */
TARGET_AVX2 static inline __m256i classes32_avx2(const uint16_t *bits, unsigned first_exponent) {
  const __m256i first = _mm256_set1_epi16((short)first_exponent), last = _mm256_set1_epi16(CLASSES - 1);
  const __m256i exponent_bits = _mm256_set1_epi16(0xff);
  __m256i half[2];
  for (int i = 0; i < 2; i++) {
    __m256i x = _mm256_loadu_si256((const __m256i *)(bits + 16 * i));
    __m256i exponent = _mm256_and_si256(_mm256_srli_epi16(x, 7), exponent_bits);
    half[i] = _mm256_min_epu16(_mm256_subs_epu16(exponent, first), last);
  }
  return _mm256_permute4x64_epi64(_mm256_packus_epi16(half[0], half[1]), 0xd8);
}

TARGET_AVX512 static inline __m512i classes64_avx512(const uint16_t *bits, unsigned first_exponent) {
  __m256i half[2];
  for (int i = 0; i < 2; i++) half[i] = _mm512_cvtepi16_epi8(_mm512_srli_epi16(_mm512_loadu_si512(bits + 32 * i), 7));
  __m512i exponents = _mm512_inserti64x4(_mm512_castsi256_si512(half[0]), half[1], 1);
  __m512i distances = _mm512_subs_epu8(exponents, _mm512_set1_epi8((char)first_exponent));
  return _mm512_min_epu8(distances, _mm512_set1_epi8(CLASSES - 1));
}

/* As `members_scalar`, several classes at once. */
TARGET_AVX2 static inline void members_avx2(const uint16_t *bits, unsigned first_exponent, uint64_t *members) {
  __m256i low = classes32_avx2(bits, first_exponent), high = classes32_avx2(bits + 32, first_exponent);
  uint64_t plane[4];
  for (int bit = 0; bit < 4; bit++) {
    uint32_t a = (uint32_t)_mm256_movemask_epi8(_mm256_slli_epi16(low, 7 - bit));
    uint32_t b = (uint32_t)_mm256_movemask_epi8(_mm256_slli_epi16(high, 7 - bit));
    plane[bit] = ((uint64_t)b << 32) | a;
  }
  __m256i first = _mm256_xor_si256(_mm256_set1_epi64x((long long)plane[0]), _mm256_setr_epi64x(-1, 0, -1, 0));
  __m256i second = _mm256_xor_si256(_mm256_set1_epi64x((long long)plane[1]), _mm256_setr_epi64x(-1, -1, 0, 0));
  __m256i lanes = _mm256_and_si256(first, second);
  for (int upper = 0; upper < 4; upper++) {
    uint64_t chosen = (upper & 1 ? plane[2] : ~plane[2]) & (upper & 2 ? plane[3] : ~plane[3]);
    __m256i masks = _mm256_and_si256(lanes, _mm256_set1_epi64x((long long)chosen));
    _mm256_storeu_si256((__m256i *)(members + 4 * upper), masks);
  }
}

TARGET_AVX2 static inline void count_avx2(const uint64_t *members, uint32_t *seen) {
  for (int c = 0; c < CLASSES; c++) seen[c] += (uint32_t)__builtin_popcountll(members[c]);
}

TARGET_AVX512 static inline void members_avx512(const uint16_t *bits, unsigned first_exponent, uint64_t *members) {
  __m512i classes = classes64_avx512(bits, first_exponent), plane[4];
  for (int bit = 0; bit < 4; bit++)
    plane[bit] = _mm512_set1_epi64((long long)_mm512_test_epi8_mask(classes, _mm512_set1_epi8((char)(1 << bit))));
  __m512i lanes = _mm512_xor_si512(plane[0], _mm512_setr_epi64(-1, 0, -1, 0, -1, 0, -1, 0));
  lanes = _mm512_and_si512(lanes, _mm512_xor_si512(plane[1], _mm512_setr_epi64(-1, -1, 0, 0, -1, -1, 0, 0)));
  lanes = _mm512_and_si512(lanes, _mm512_xor_si512(plane[2], _mm512_setr_epi64(-1, -1, -1, -1, 0, 0, 0, 0)));
  _mm512_storeu_si512(members, _mm512_andnot_si512(plane[3], lanes));
  _mm512_storeu_si512(members + 8, _mm512_and_si512(plane[3], lanes));
}

TARGET_AVX2 static inline unsigned place_avx2(uint64_t mask, unsigned number) {
  return (unsigned)__builtin_ctzll(_pdep_u64(1ull << number, mask));
}

TARGET_AVX512 static inline void count_avx512(const uint64_t *members, uint32_t *seen) {
  const __m512i low_words = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  __m512i low = _mm512_popcnt_epi64(_mm512_loadu_si512(members));
  __m512i high = _mm512_popcnt_epi64(_mm512_loadu_si512(members + 8));
  __m512i counts = _mm512_permutex2var_epi32(low, low_words, high);
  _mm512_storeu_si512(seen, _mm512_add_epi32(_mm512_loadu_si512(seen), counts));
}
#endif

/* ------------------------------------------------------------------ scan */

#define DEFINE_SCAN(NAME, TARGET, CHANGED)                                                                       \
  TARGET static int64_t NAME(const uint16_t *base, const uint16_t *target, size_t n, uint32_t *positions,        \
                             uint16_t *steps) {                                                                  \
    size_t found = 0, i = 0;                                                                                     \
    for (; i + BLOCK <= n; i += BLOCK) {                                                                         \
      fetch_ahead(base + i);                                                                                     \
      fetch_ahead(target + i);                                                                                   \
      for (uint64_t changed = CHANGED(base + i, target + i); changed; changed &= changed - 1) {                  \
        size_t at = i + (size_t)__builtin_ctzll(changed);                                                        \
        positions[found] = (uint32_t)at;                                                                         \
        steps[found++] = (uint16_t)(target[at] - base[at]);                                                      \
      }                                                                                                          \
    }                                                                                                            \
    for (; i < n; i++) {                                                                                         \
      if (base[i] == target[i]) continue;                                                                        \
      positions[found] = (uint32_t)i;                                                                            \
      steps[found++] = (uint16_t)(target[i] - base[i]);                                                          \
    }                                                                                                            \
    return (int64_t)found;                                                                                       \
  }

DEFINE_SCAN(scan_scalar, , changed_scalar)
#ifdef HAVE_X86
DEFINE_SCAN(scan_avx2, TARGET_AVX2, changed_avx2)
DEFINE_SCAN(scan_avx512, TARGET_AVX512, changed_avx512)
#endif

/* Positions and wrapped steps of the changed elements, ascending; both arrays hold n. Returns their number. */
int64_t af_scan(const uint16_t *base, const uint16_t *target, size_t n, uint32_t *positions, uint16_t *steps) {
#ifdef HAVE_X86
  if (isa() == AVX512) return scan_avx512(base, target, n, positions, steps);
  if (isa() == AVX2) return scan_avx2(base, target, n, positions, steps);
#endif
  return scan_scalar(base, target, n, positions, steps);
}

/* ------------------------------------------------------------------ ranks inside classes, and back */

typedef struct {
  uint32_t *ranks;
  uint16_t *steps;
  uint8_t *classes;
} Found;

static size_t rank_tail(const uint16_t *base, const uint16_t *target, size_t from, size_t n, unsigned first_exponent,
                        uint32_t *seen, Found found, size_t count) {
  for (size_t i = from; i < n; i++) {
    unsigned c = class_of(base[i], first_exponent);
    if (base[i] != target[i]) {
      found.ranks[count] = seen[c];
      found.steps[count] = (uint16_t)(target[i] - base[i]);
      found.classes[count++] = (uint8_t)c;
    }
    seen[c]++;
  }
  return count;
}

#define DEFINE_RANK(NAME, TARGET, CHANGED, MEMBERS, COUNT)                                                       \
  TARGET static size_t NAME(const uint16_t *base, const uint16_t *target, size_t n, unsigned first_exponent,     \
                            uint32_t *seen, Found found) {                                                       \
    uint64_t members[CLASSES];                                                                                   \
    size_t count = 0, i = 0;                                                                                     \
    for (; i + BLOCK <= n; i += BLOCK) {                                                                         \
      fetch_ahead(base + i);                                                                                     \
      fetch_ahead(target + i);                                                                                   \
      uint64_t changed = CHANGED(base + i, target + i);                                                          \
      MEMBERS(base + i, first_exponent, members);                                                                \
      for (; changed; changed &= changed - 1) {                                                                  \
        unsigned bit = (unsigned)__builtin_ctzll(changed);                                                       \
        size_t at = i + bit;                                                                                     \
        unsigned c = class_of(base[at], first_exponent);                                                         \
        uint64_t before = members[c] & ((1ull << bit) - 1);                                                      \
        found.ranks[count] = seen[c] + (uint32_t)__builtin_popcountll(before);                                   \
        found.steps[count] = (uint16_t)(target[at] - base[at]);                                                  \
        found.classes[count++] = (uint8_t)c;                                                                     \
      }                                                                                                          \
      COUNT(members, seen);                                                                                      \
    }                                                                                                            \
    return rank_tail(base, target, i, n, first_exponent, seen, found, count);                                    \
  }

DEFINE_RANK(rank_scalar, , changed_scalar, members_scalar, count_scalar)
#ifdef HAVE_X86
DEFINE_RANK(rank_avx2, TARGET_AVX2, changed_avx2, members_avx2, count_avx2)
DEFINE_RANK(rank_avx512, TARGET_AVX512, changed_avx512, members_avx512, count_avx512)
#endif

/* Ranks of the changed elements among the elements whose old value is of the same class, grouped by class and
   ascending inside it, with their steps. All arrays hold n; counts and populations hold 16 and are set. */
int64_t af_rank(const uint16_t *base, const uint16_t *target, size_t n, unsigned first_exponent, uint32_t *scratch_ranks,
                uint16_t *scratch_steps, uint8_t *scratch_classes, uint32_t *ranks, uint16_t *steps, uint32_t *counts,
                uint32_t *populations) {
  Found found = {scratch_ranks, scratch_steps, scratch_classes};
  size_t count;
  memset(populations, 0, CLASSES * sizeof *populations);
#ifdef HAVE_X86
  if (isa() == AVX512)
    count = rank_avx512(base, target, n, first_exponent, populations, found);
  else if (isa() == AVX2)
    count = rank_avx2(base, target, n, first_exponent, populations, found);
  else
#endif
    count = rank_scalar(base, target, n, first_exponent, populations, found);
  memset(counts, 0, CLASSES * sizeof *counts);
  for (size_t i = 0; i < count; i++) counts[found.classes[i]]++;
  size_t next[CLASSES], start = 0;
  for (int c = 0; c < CLASSES; c++) {
    next[c] = start;
    start += counts[c];
  }
  for (size_t i = 0; i < count; i++) {
    size_t to = next[found.classes[i]]++;
    ranks[to] = found.ranks[i];
    steps[to] = found.steps[i];
  }
  return (int64_t)count;
}

typedef struct {
  const uint32_t *ranks;
  const uint16_t *steps;
  uint32_t *positions;
  uint16_t *ordered;
  size_t cursor[CLASSES], end[CLASSES], found, all;
} Lookup;

static void locate_tail(const uint16_t *base, size_t from, size_t n, unsigned first_exponent, uint32_t *seen,
                        Lookup *lookup) {
  for (size_t i = from; i < n && lookup->found < lookup->all; i++) {
    int c = (int)class_of(base[i], first_exponent);
    size_t at = lookup->cursor[c];
    if (at < lookup->end[c] && lookup->ranks[at] == seen[c]) {
      lookup->positions[lookup->found] = (uint32_t)i;
      lookup->ordered[lookup->found++] = lookup->steps[at];
      lookup->cursor[c]++;
    }
    seen[c]++;
  }
}

/* The blocks of one chunk: members of each class, and how many of it come before the block. */
typedef struct {
  uint64_t members[CHUNK_BLOCKS][CLASSES];
  uint32_t before[CHUNK_BLOCKS][CLASSES];
} Chunk;

/* `NAME_class` finds what is wanted of class `c` in the chunk at `start`, where `end` is the first rank behind it. Which
   block holds a rank is found without branches, by halving: the processor could not foresee them either. */
#define DEFINE_LOCATE(NAME, TARGET, MEMBERS, COUNT, PLACE)                                                       \
  TARGET static inline void NAME##_class(const Chunk *chunk, int c, size_t start, uint32_t end, Lookup *lookup) {\
    size_t at = lookup->cursor[c], last = lookup->end[c], to = lookup->found;                                    \
    for (; at < last && lookup->ranks[at] < end; at++, to++) {                                                   \
      uint32_t rank = lookup->ranks[at];                                                                         \
      size_t block = 0;                                                                                          \
      for (size_t half = CHUNK_BLOCKS / 2; half; half /= 2)                                                      \
        block += chunk->before[block + half][c] <= rank ? half : 0;                                              \
      unsigned place = PLACE(chunk->members[block][c], rank - chunk->before[block][c]);                          \
      lookup->positions[to] = (uint32_t)(start + block * BLOCK + place);                                         \
      lookup->ordered[to] = lookup->steps[at];                                                                   \
    }                                                                                                            \
    lookup->cursor[c] = at;                                                                                      \
    lookup->found = to;                                                                                          \
  }                                                                                                              \
                                                                                                                 \
  TARGET static void NAME(const uint16_t *base, size_t n, unsigned first_exponent, Lookup *lookup) {             \
    Chunk chunk;                                                                                                 \
    uint32_t seen[CLASSES] = {0};                                                                                \
    size_t start = 0;                                                                                            \
    while (start + BLOCK <= n && lookup->found < lookup->all) {                                                  \
      size_t blocks = (n - start) / BLOCK < CHUNK_BLOCKS ? (n - start) / BLOCK : CHUNK_BLOCKS;                   \
      for (size_t b = 0; b < blocks; b++) {                                                                      \
        const uint16_t *block = base + start + b * BLOCK;                                                        \
        fetch_ahead(block);                                                                                      \
        memcpy(chunk.before[b], seen, sizeof seen);                                                              \
        MEMBERS(block, first_exponent, chunk.members[b]);                                                        \
        COUNT(chunk.members[b], seen);                                                                           \
      }                                                                                                          \
      memset(chunk.before[blocks], 0xff, (CHUNK_BLOCKS - blocks) * sizeof seen);                                 \
      for (int c = 0; c < CLASSES; c++) NAME##_class(&chunk, c, start, seen[c], lookup);                         \
      start += blocks * BLOCK;                                                                                   \
    }                                                                                                            \
    locate_tail(base, start, n, first_exponent, seen, lookup);                                                   \
  }

DEFINE_LOCATE(locate_scalar, , members_scalar, count_scalar, place_scalar)
#ifdef HAVE_X86
DEFINE_LOCATE(locate_avx2, TARGET_AVX2, members_avx2, count_avx2, place_avx2)
DEFINE_LOCATE(locate_avx512, TARGET_AVX512, members_avx512, count_avx512, place_avx2)
#endif

/* Positions of elements known by class and rank, and their steps, both in order of the chunks they lie in: the inverse
   of `af_rank`. `ranks` are grouped by class and strictly ascending inside it; OUT_OF_RANGE when a class
   has fewer elements than a rank says. */
int af_locate(const uint16_t *base, size_t n, unsigned first_exponent, const uint32_t *counts, const uint32_t *ranks,
              const uint16_t *steps, uint32_t *positions, uint16_t *ordered) {
  Lookup lookup = {.ranks = ranks, .steps = steps, .positions = positions, .ordered = ordered};
  for (int c = 0; c < CLASSES; c++) {
    lookup.cursor[c] = lookup.all;
    lookup.end[c] = lookup.all += counts[c];
  }
#ifdef HAVE_X86
  if (isa() == AVX512)
    locate_avx512(base, n, first_exponent, &lookup);
  else if (isa() == AVX2)
    locate_avx2(base, n, first_exponent, &lookup);
  else
#endif
    locate_scalar(base, n, first_exponent, &lookup);
  return lookup.found < lookup.all ? OUT_OF_RANGE : OK;
}

/* ------------------------------------------------------------------ bit planes */

/* Seven planes, least significant bit first: quotients and remainders of the gaps, signs, quotients and
   remainders of the runs between exceptions, lengths and low bits of the magnitudes. */
enum { GAP_Q, GAP_R, SIGN, RUN_Q, RUN_R, SIZE_Q, SIZE_R, PLANES };

/* How one class is coded: mode 0 lists the steps beyond one unit, mode 1 gives every step its size. */
typedef struct {
  uint32_t count, exceptions, population;
  uint8_t gap_bits, mode, size_bits, unused;
} ClassCode;

typedef struct {
  uint8_t *at, *end;
  uint64_t pending;
  unsigned bits;
  int full;
} Writer;

static inline void put(Writer *w, uint64_t value, unsigned bits) { /* at most 32 bits */
  w->pending |= value << w->bits;
  w->bits += bits;
  if (w->bits < 32) return;
  if (w->end - w->at < 4) {
    w->full = 1;
    w->bits = 0;
    w->pending = 0;
    return;
  }
  memcpy(w->at, &w->pending, 4);
  w->at += 4;
  w->pending >>= 32;
  w->bits -= 32;
}

static inline void put_unary(Writer *w, uint32_t zeros) {
  for (; zeros > 31; zeros -= 32) put(w, 0, 32);
  put(w, 1ull << zeros, zeros + 1);
}

static void finish(Writer *w) {
  for (; w->bits > 0; w->bits = w->bits > 8 ? w->bits - 8 : 0, w->pending >>= 8) {
    if (w->at == w->end) {
      w->full = 1;
      return;
    }
    *w->at++ = (uint8_t)w->pending;
  }
}

static inline uint32_t low_bits(uint32_t value, unsigned bits) { return value & ((1u << bits) - 1); }

static inline uint32_t magnitude(uint16_t step) { return step & 0x8000 ? 0x10000u - step : step; }

/* Exp-Golomb of the given order: the number of extra bits in unary, then all low bits. */
static inline void put_size(Writer *planes, uint32_t value, unsigned order) {
  value += 1u << order;
  unsigned length = 31 - (unsigned)__builtin_clz(value);
  put_unary(planes + SIZE_Q, length - order);
  put(planes + SIZE_R, low_bits(value, length), length);
}

static void pack_steps(Writer *planes, const uint16_t *steps, const ClassCode *code) {
  uint32_t run = 0;
  for (uint32_t i = 0; i < code->count; i++) {
    uint32_t size = magnitude(steps[i]);
    if (code->mode == 1) {
      put_size(planes, size - 1, code->size_bits);
    } else if (size == 1) {
      run++;
    } else {
      put_unary(planes + RUN_Q, run >> code->size_bits);
      put(planes + RUN_R, low_bits(run, code->size_bits), code->size_bits);
      put_size(planes, size - 2, 0);
      run = 0;
    }
  }
}

/* Packs `ranks` and `steps`, grouped by class. `planes` hold `capacities` bytes and get `lengths`. */
int af_pack(const uint32_t *ranks, const uint16_t *steps, const ClassCode *codes, size_t num_codes, uint8_t **planes,
            const size_t *capacities, size_t *lengths) {
  Writer writers[PLANES];
  for (int p = 0; p < PLANES; p++) writers[p] = (Writer){.at = planes[p], .end = planes[p] + capacities[p]};
  for (size_t c = 0; c < num_codes; c++) {
    const ClassCode *code = codes + c;
    uint32_t next = 0;
    for (uint32_t i = 0; i < code->count; i++) {
      uint32_t gap = ranks[i] - next;
      next = ranks[i] + 1;
      put_unary(writers + GAP_Q, gap >> code->gap_bits);
      put(writers + GAP_R, low_bits(gap, code->gap_bits), code->gap_bits);
      put(writers + SIGN, steps[i] >> 15, 1);
    }
    pack_steps(writers, steps, code);
    ranks += code->count;
    steps += code->count;
  }
  for (int p = 0; p < PLANES; p++) {
    finish(writers + p);
    if (writers[p].full) return NO_ROOM;
    lengths[p] = (size_t)(writers[p].at - planes[p]);
  }
  return OK;
}

typedef struct {
  const uint8_t *at, *end;
  uint64_t pending;
  unsigned bits;
  int cut;
} Reader;

static inline void refill(Reader *r) { /* more than 32 bits afterwards, unless the plane ends */
  if (r->bits > 32) return;
  if (r->end - r->at >= 4) {
    uint32_t word;
    memcpy(&word, r->at, 4);
    r->at += 4;
    r->pending |= (uint64_t)word << r->bits;
    r->bits += 32;
    return;
  }
  for (; r->at < r->end && r->bits <= 56; r->bits += 8) r->pending |= (uint64_t)*r->at++ << r->bits;
}

static inline uint32_t take(Reader *r, unsigned bits) {
  refill(r);
  if (bits > r->bits) {
    r->cut = 1;
    return 0;
  }
  uint32_t value = (uint32_t)(r->pending & ((1ull << bits) - 1));
  r->pending >>= bits;
  r->bits -= bits;
  return value;
}

static inline uint32_t take_unary(Reader *r) {
  uint32_t zeros = 0;
  for (refill(r); !r->pending; refill(r)) {
    if (!r->bits) {
      r->cut = 1;
      return 0;
    }
    zeros += r->bits;
    r->bits = 0;
  }
  unsigned more = (unsigned)__builtin_ctzll(r->pending);
  r->pending >>= more;
  r->pending >>= 1;
  r->bits -= more + 1;
  return zeros + more;
}

static int all_taken(const Reader *r) { return r->at == r->end && r->bits < 8 && !r->pending; }

static inline int take_size(Reader *planes, unsigned order, uint32_t *value) {
  uint32_t length = take_unary(planes + SIZE_Q) + order;
  if (length > 16) return OUT_OF_RANGE;
  *value = ((1u << length) | take(planes + SIZE_R, length)) - (1u << order);
  return OK;
}

/* Gives `step`, which is plus or minus one, its size; two spellings of one step are not accepted. */
static inline int resize(uint16_t *step, uint32_t size) {
  int negative = *step >> 15;
  if (size > 0x7fffu + (uint32_t)negative) return OUT_OF_RANGE;
  *step = (uint16_t)(negative ? 0x10000u - size : size);
  return OK;
}

static int unpack_steps(Reader *planes, uint16_t *steps, const ClassCode *code) {
  uint32_t value;
  uint64_t at = 0;
  uint32_t listed = code->mode == 1 ? code->count : code->exceptions;
  for (uint32_t i = 0; i < listed; i++, at++) {
    if (code->mode == 0) {
      uint64_t run = (uint64_t)take_unary(planes + RUN_Q) << code->size_bits;
      at += run + take(planes + RUN_R, code->size_bits);
      if (at >= code->count) return OUT_OF_RANGE;
    }
    int status = take_size(planes, code->mode == 1 ? code->size_bits : 0, &value);
    if (status == OK) status = resize(steps + at, value + (code->mode == 1 ? 1 : 2));
    if (status != OK) return status;
  }
  return OK;
}

/* The inverse of `af_pack`. `ranks` and `steps` hold the sum of the counts; nothing is written beyond. */
int af_unpack(const uint8_t *const *planes, const size_t *lengths, const ClassCode *codes, size_t num_codes,
              uint32_t *ranks, uint16_t *steps) {
  Reader readers[PLANES];
  for (int p = 0; p < PLANES; p++) readers[p] = (Reader){.at = planes[p], .end = planes[p] + lengths[p]};
  for (size_t c = 0; c < num_codes; c++) {
    const ClassCode *code = codes + c;
    uint64_t next = 0;
    for (uint32_t i = 0; i < code->count; i++) {
      uint64_t quotient = (uint64_t)take_unary(readers + GAP_Q) << code->gap_bits;
      next += quotient + take(readers + GAP_R, code->gap_bits);
      if (next >= code->population) return readers[GAP_Q].cut ? CUT_SHORT : OUT_OF_RANGE;
      ranks[i] = (uint32_t)next++;
      steps[i] = take(readers + SIGN, 1) ? 0xffff : 1;
    }
    int status = unpack_steps(readers, steps, code);
    if (status != OK) return status;
    ranks += code->count;
    steps += code->count;
  }
  for (int p = 0; p < PLANES; p++) {
    if (readers[p].cut) return CUT_SHORT;
    if (!all_taken(readers + p)) return LEFT_OVER;
  }
  return OK;
}

/* Adds steps to the elements at the positions, which the caller has checked; sums wrap around. */
void af_add(uint16_t *tile, const uint32_t *positions, const uint16_t *steps, size_t count) {
  for (size_t i = 0; i < count; i++) tile[positions[i]] = (uint16_t)(tile[positions[i]] + steps[i]);
}

/* ------------------------------------------------------------------ parameters */

enum { MAX_GAP_BITS = 21, MAX_SIZE_BITS = 15 };

static int floor_log2(uint64_t value) { return 63 - __builtin_clzll(value | 1); }

/* Bits of Rice codes: the quotients of three neighbouring parameters are summed up in one pass. */
typedef struct {
  unsigned first;
  uint64_t quotients[3];
} Trial;

static Trial trial(uint64_t population, uint64_t count) {
  int middle = floor_log2(population / count);
  return (Trial){.first = middle > 0 ? (unsigned)middle - 1 : 0};
}

static inline void try_value(Trial *t, uint32_t value) {
  for (unsigned i = 0; i < 3; i++) t->quotients[i] += value >> (t->first + i);
}

/* The cheapest parameter, the smallest of equals, and its cost in bits beside the ending bits. */
static uint64_t settle(const Trial *t, uint64_t count, unsigned most, uint8_t *bits) {
  uint64_t best = UINT64_MAX;
  for (unsigned i = 0; i < 3; i++) {
    uint64_t cost = t->quotients[i] + count * (t->first + i);
    if (t->first + i > most || cost >= best) continue;
    best = cost;
    *bits = (uint8_t)(t->first + i);
  }
  return best;
}

static inline uint64_t size_cost(uint32_t value, unsigned order) {
  unsigned length = (unsigned)floor_log2((uint64_t)value + (1u << order));
  return 2 * length + 1 - order;
}

static uint64_t listed_cost(const uint16_t *steps, ClassCode *code) {
  uint64_t count = code->exceptions, cost = count;
  uint32_t run = 0;
  code->size_bits = 0;
  if (!count) return 0;
  Trial runs = trial(code->count, count);
  for (uint32_t i = 0; i < code->count; i++) {
    uint32_t size = magnitude(steps[i]);
    if (size == 1) {
      run++;
      continue;
    }
    try_value(&runs, run);
    cost += size_cost(size - 2, 0);
    run = 0;
  }
  return cost + settle(&runs, count, MAX_SIZE_BITS, &code->size_bits);
}

static uint64_t sized_cost(const uint16_t *steps, uint32_t count, uint64_t excess, uint8_t *order) {
  int middle = floor_log2(excess / count);
  unsigned first = middle > 0 ? (unsigned)middle - 1 : 0;
  uint64_t costs[3] = {0}, best = UINT64_MAX;
  for (uint32_t i = 0; i < count; i++)
    for (unsigned k = 0; k < 3; k++) costs[k] += size_cost(magnitude(steps[i]) - 1, first + k);
  for (unsigned k = 0; k < 3; k++) {
    if (first + k > MAX_SIZE_BITS || costs[k] >= best) continue;
    best = costs[k];
    *order = (uint8_t)(first + k);
  }
  return best;
}

static void choose_sizes(const uint16_t *steps, ClassCode *code) {
  uint64_t excess = 0;
  code->exceptions = 0;
  for (uint32_t i = 0; i < code->count; i++) {
    uint32_t size = magnitude(steps[i]);
    code->exceptions += size > 1;
    excess += size - 1;
  }
  code->mode = 0;
  uint64_t listed = listed_cost(steps, code);
  /* Giving every step its size costs each a bit at least. */
  if (listed <= code->count) return;
  uint8_t order = 0;
  if (sized_cost(steps, code->count, excess, &order) >= listed) return;
  code->mode = 1;
  code->size_bits = order;
  code->exceptions = 0;
}

/* Sets the cheapest parameters of each class, whose count and population are given. */
void af_choose(const uint32_t *ranks, const uint16_t *steps, ClassCode *codes, size_t num_codes) {
  for (size_t c = 0; c < num_codes; c++) {
    ClassCode *code = codes + c;
    if (!code->count) continue;
    Trial gaps = trial(code->population, code->count);
    uint32_t next = 0;
    for (uint32_t i = 0; i < code->count; i++) {
      try_value(&gaps, ranks[i] - next);
      next = ranks[i] + 1;
    }
    settle(&gaps, code->count, MAX_GAP_BITS, &code->gap_bits);
    choose_sizes(steps, code);
    ranks += code->count;
    steps += code->count;
  }
}
