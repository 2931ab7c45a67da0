/* Where rows go, and sums of rows: the small work around dispatch and combine.

   P ranks · C tokens of a rank at most · T tokens of this rank · K slots of a token, -1 for none ·
   G groups of slots, each of `slots` · H hidden. Rows of all ranks lie in one array; token t of rank
   p is row p * stride + t of it, counted from `ids` and `weights` as they are given. */

#include <stdint.h>
#include <string.h>

enum { BLOCK = 2048 };
enum { FLOAT32 = 0, BFLOAT16 = 1 };

struct tokens {
    const int32_t *ids;    /* [.., K] */
    const float *weights;  /* [.., K] */
    const int64_t *counts; /* [P] */
    int64_t ranks, stride, top_k, rank;
    int64_t slots, groups, group;
};

/* Tokens that go to this rank's group, in the order of ranks and tokens.

   For each: its row, its ids within the group (-1 for others), its weights. For this rank's own
   tokens: their place in every group they go to, [T, G]; with `pairs` the place of every pair of
   token and slot in the group that has the slot, [T, K]. `everywhere`: all tokens go to all groups.
   `cursors`: rows that each group already has; moved on. Gives how many rows; `own`: of them, how
   many are this rank's. */
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
            for (int64_t k = 0; k < top_k; k++)
                if (ids[k] >= 0)
                    wanted |= (uint64_t)1 << (ids[k] / in->slots);
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

/* Pairs of token and slot by slot, in each in the order of ranks and tokens.

   `rows`: the rows of this rank's group, slot after slot; `filled`: how many each of its slots has;
   `places`: of this rank's own pairs, [T, K]: how many stand before it in its slot. `cursors` [G *
   slots] is room to count. Gives how many rows; `own`: of them, how many are this rank's. */
int64_t plan_pairs(const struct tokens *in, int64_t *cursors, int64_t *rows, int64_t *filled,
                   int64_t *places, int64_t *own)
{
    int64_t top_k = in->top_k, first = in->group * in->slots, total = in->groups * in->slots;
    memset(cursors, 0, total * sizeof(int64_t));
    for (int64_t p = 0; p < in->ranks; p++)
        for (int64_t i = 0; i < in->counts[p] * top_k; i++) {
            int32_t id = in->ids[p * in->stride * top_k + i];
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

static void add_floats(float *sum, const float *row, float weight, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        sum[i] += weight * row[i];
}

static void add_bfloats(float *sum, const uint16_t *row, float weight, int64_t count)
{
    for (int64_t i = 0; i < count; i++) {
        union {
            uint32_t bits;
            float value;
        } wide = {(uint32_t)row[i] << 16};
        sum[i] += weight * wide.value;
    }
}

static void store_bfloats(uint16_t *out, const float *sum, int64_t count)
{
    for (int64_t i = 0; i < count; i++) {
        union {
            float value;
            uint32_t bits;
        } wide = {sum[i]};
        uint32_t rounded = (wide.bits + 0x7fff + (wide.bits >> 16 & 1)) >> 16;
        int is_nan = (wide.bits & 0x7fffffff) > 0x7f800000;
        out[i] = is_nan ? 0x7fc0 : rounded;
    }
}

static void add_row(const struct sums *in, float *sum, int64_t row, float weight, int64_t from,
                    int64_t count)
{
    int64_t at = row * in->hidden + from;
    if (in->type == BFLOAT16)
        add_bfloats(sum, (const uint16_t *)in->y + at, weight, count);
    else
        add_floats(sum, (const float *)in->y + at, weight, count);
}

/* out[t] = sum over s and w of weights[t, s] * y[(owners[t, s] * width + w) * stride + places[t, s]],
   in that order, in float32, for tokens first .. last. Gives how many rows were those of other ranks
   than `rank`, a rank's being those of one stride. */
int64_t sum_rows(const struct sums *in, int64_t first, int64_t last)
{
    float sum[BLOCK];
    int64_t foreign = 0;
    for (int64_t t = first; t < last; t++)
        for (int64_t from = 0; from < in->hidden; from += BLOCK) {
            int64_t count = in->hidden - from < BLOCK ? in->hidden - from : BLOCK;
            memset(sum, 0, count * sizeof(float));
            for (int64_t i = t * in->terms; i < (t + 1) * in->terms; i++) {
                if (in->places[i] < 0)
                    continue;
                int64_t owner = in->owners ? in->owners[i] * in->width : 0;
                float weight = in->weights ? in->weights[i] : 1.0f;
                for (int64_t w = owner; w < owner + in->width; w++) {
                    add_row(in, sum, w * in->stride + in->places[i], weight, from, count);
                    foreign += !from && w != in->rank;
                }
            }
            int64_t at = t * in->hidden + from;
            if (in->type == BFLOAT16)
                store_bfloats((uint16_t *)in->out + at, sum, count);
            else
                memcpy((float *)in->out + at, sum, count * sizeof(float));
        }
    return foreign;
}
