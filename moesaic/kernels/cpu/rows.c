/* Plans of rows and sums of rows, for dispatch and combine.

   P ranks · C tokens of a rank at most · T tokens of this rank · K slots of a token, -1 for none ·
   G groups of slots, each of `slots` · H hidden. Rows of all ranks are in one array; token t of rank
   p is row p * stride + t, counted from the given `ids` and `weights`. */

#ifdef __AVX512F__
#include <immintrin.h>
#endif
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { VECTOR = 16 };
enum { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };

struct tokens {
    const int32_t *ids;    /* [.., K] */
    const float *weights;  /* [.., K] */
    const int64_t *counts; /* [P] */
    int64_t ranks, stride, top_k, rank;
    int64_t slots, groups, group;
};

/* Tokens that go to this rank's group, in the order of ranks and tokens.

   Writes for each its row, its ids within the group (-1 for others) and its weights; for this rank's
   own tokens the place in every group they go to, [T, G], or with `pairs` the place of every pair of
   token and slot in the slot's group, [T, K]. `everywhere`: all tokens go to all groups. `cursors`:
   rows that each group already has; advanced. Returns the number of rows, or -1 for an invalid slot;
   `own`: how many of them are this rank's. */
int64_t plan_rows(const struct tokens *in, int pairs, int everywhere, int64_t *cursors,
                  int64_t *rows, int64_t *local_ids, float *weights, int64_t *places, int64_t *own)
{
    int64_t top_k = in->top_k, first = in->group * in->slots, found = 0;
    *own = 0;
    for (int64_t p = 0; p < in->ranks; p++)
        for (int64_t t = 0; t < in->counts[p]; t++) {
            int64_t row = p * in->stride + t;
            const int32_t *ids = in->ids + row * top_k;
            uint64_t wanted = everywhere ? (uint64_t)-1 : 0;
            for (int64_t k = 0; k < top_k; k++) {
                if (ids[k] >= in->groups * in->slots)
                    return -1;
                if (ids[k] >= 0)
                    wanted |= (uint64_t)1 << (ids[k] / in->slots);
            }
            if (wanted >> in->group & 1) {
                for (int64_t k = 0; k < top_k; k++) {
                    int64_t id = ids[k] - first;
                    local_ids[found * top_k + k] = id >= 0 && id < in->slots ? id : -1;
                }
                memcpy(weights + found * top_k, in->weights + row * top_k, top_k * sizeof(float));
                rows[found++] = row;
                *own += p == in->rank;
            }
            if (pairs)
                for (int64_t k = 0; k < top_k; k++) {
                    int64_t place = ids[k] < 0 ? -1 : cursors[ids[k] / in->slots]++;
                    if (p == in->rank)
                        places[t * top_k + k] = place;
                }
            else
                for (int64_t g = 0; g < in->groups; g++) {
                    int64_t place = wanted >> g & 1 ? cursors[g]++ : -1;
                    if (p == in->rank)
                        places[t * in->groups + g] = place;
                }
        }
    return found;
}

/* Sorts pairs of token and slot by slot, and within a slot by rank and token.

   `rows`: the rows of this rank's group, slot after slot; `filled`: the rows of each of its slots;
   `places` [T, K]: the position of this rank's own pairs in their slots. `cursors` [G * slots] is
   workspace. Returns the number of rows, or -1 for an invalid slot; `own`: how many of them are this
   rank's. */
int64_t plan_pairs(const struct tokens *in, int64_t *cursors, int64_t *rows, int64_t *filled,
                   int64_t *places, int64_t *own)
{
    int64_t top_k = in->top_k, first = in->group * in->slots, total = in->groups * in->slots;
    memset(cursors, 0, total * sizeof(int64_t));
    for (int64_t p = 0; p < in->ranks; p++)
        for (int64_t i = 0; i < in->counts[p] * top_k; i++) {
            int32_t id = in->ids[p * in->stride * top_k + i];
            if (id >= total)
                return -1;
            int64_t place = id < 0 ? -1 : cursors[id]++;
            if (p == in->rank)
                places[i] = place;
        }
    int64_t found = 0;
    for (int64_t slot = 0; slot < in->slots; slot++) {
        filled[slot] = cursors[first + slot];
        cursors[first + slot] = found;
        found += filled[slot];
    }
    *own = 0;
    for (int64_t p = 0; p < in->ranks; p++)
        for (int64_t i = 0; i < in->counts[p] * top_k; i++) {
            int64_t id = in->ids[p * in->stride * top_k + i];
            if (id >= first && id < first + in->slots) {
                rows[cursors[id]++] = p * in->stride + i / top_k;
                *own += p == in->rank;
            }
        }
    return found;
}

struct sums {
    const void *y;          /* [.., H] */
    const int64_t *owners;  /* [T, S]; null: all 0 */
    const int64_t *places;  /* [T, S]; -1: none */
    const float *weights;   /* [T, S]; null: all 1 */
    void *out;              /* [T, H] */
    int64_t terms, hidden, stride, width, rank;
    int32_t type;
};

typedef float floats __attribute__((vector_size(64)));
typedef uint32_t words __attribute__((vector_size(64)));
typedef uint16_t shorts __attribute__((vector_size(32)));

/* 16 numbers of a row as float32. */
static inline floats load(const struct sums *in, int32_t type, int64_t at)
{
    floats wide;
    if (type == FLOAT32) {
        memcpy(&wide, (const float *)in->y + at, sizeof wide);
        return wide;
    }
    shorts narrow;
    memcpy(&narrow, (const uint16_t *)in->y + at, sizeof narrow);
    if (type == BFLOAT16)
        return (floats)(__builtin_convertvector(narrow, words) << 16);
#ifdef __AVX512F__
    return (floats)_mm512_cvtph_ps((__m256i)narrow);
#else
    for (int i = 0; i < VECTOR; i++)
        wide[i] = (float)((const _Float16 *)in->y)[at + i];
    return wide;
#endif
}

static float load_one(const struct sums *in, int64_t at)
{
    if (in->type == FLOAT32)
        return ((const float *)in->y)[at];
    if (in->type == FLOAT16)
        return (float)((const _Float16 *)in->y)[at];
    uint32_t bits = (uint32_t)((const uint16_t *)in->y)[at] << 16;
    float wide;
    memcpy(&wide, &bits, sizeof wide);
    return wide;
}

static void store(const struct sums *in, const float *sum, int64_t at, int64_t count)
{
    if (in->type == FLOAT32)
        memcpy((float *)in->out + at, sum, count * sizeof(float));
    else if (in->type == FLOAT16)
        for (int64_t i = 0; i < count; i++)
            ((_Float16 *)in->out)[at + i] = (_Float16)sum[i];
    else
        for (int64_t i = 0; i < count; i++) {
            uint32_t bits;
            memcpy(&bits, sum + i, sizeof bits);
            uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
            int is_nan = (bits & 0x7fffffff) > 0x7f800000;
            ((uint16_t *)in->out)[at + i] = is_nan ? 0x7fc0 : rounded;
        }
}

/* Lists the terms of one token as rows and weights; returns their number. */
static int64_t terms_of(const struct sums *in, int64_t t, int64_t *rows, float *weights,
                        int64_t *foreign)
{
    int64_t found = 0;
    for (int64_t i = t * in->terms; i < (t + 1) * in->terms; i++) {
        if (in->places[i] < 0)
            continue;
        int64_t owner = in->owners ? in->owners[i] * in->width : 0;
        for (int64_t w = owner; w < owner + in->width; w++) {
            rows[found] = w * in->stride + in->places[i];
            weights[found++] = in->weights ? in->weights[i] : 1.0f;
            *foreign += w != in->rank;
        }
    }
    return found;
}

/* Sums the terms of one token. The type is a constant in each call, so it is not tested for every
   number. */
static inline __attribute__((always_inline)) void sum_token(
    const struct sums *in, int32_t type, int64_t t, const int64_t *rows, const float *weights,
    int64_t count)
{
    int64_t hidden = in->hidden, from = 0;
    for (; from + 4 * VECTOR <= hidden; from += 4 * VECTOR) {
        floats sum[4] = {{0}, {0}, {0}, {0}};
        for (int64_t i = 0; i < count; i++)
            for (int v = 0; v < 4; v++)
                sum[v] += weights[i] * load(in, type, rows[i] * hidden + from + v * VECTOR);
        store(in, (const float *)sum, t * hidden + from, 4 * VECTOR);
    }
    for (; from < hidden; from++) {
        float sum = 0;
        for (int64_t i = 0; i < count; i++)
            sum += weights[i] * load_one(in, rows[i] * hidden + from);
        store(in, &sum, t * hidden + from, 1);
    }
}

/* out[t] = sum over s and w of weights[t, s] * y[(owners[t, s] * width + w) * stride + places[t, s]],
   in that order, in float32, for tokens first .. last. `foreign`: the number of rows of other ranks
   than `rank`; a rank has the rows of one stride. Returns 0, or 1 without memory. */
int64_t sum_rows(const struct sums *in, int64_t first, int64_t last, int64_t *foreign)
{
    int64_t most = in->terms * in->width;
    int64_t *rows = malloc(most * sizeof(int64_t) + 1);
    float *weights = malloc(most * sizeof(float) + 1);
    *foreign = 0;
    for (int64_t t = first; t < last && rows && weights; t++) {
        int64_t count = terms_of(in, t, rows, weights, foreign);
        if (in->type == BFLOAT16)
            sum_token(in, BFLOAT16, t, rows, weights, count);
        else if (in->type == FLOAT16)
            sum_token(in, FLOAT16, t, rows, weights, count);
        else
            sum_token(in, FLOAT32, t, rows, weights, count);
    }
    int failed = !rows || !weights;
    free(rows);
    free(weights);
    return failed;
}
