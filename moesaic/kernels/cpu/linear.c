/* y = x W^T + bias, where each row of y depends only on the same row of x.

   Weights are read in place. Tokens are the other operand, 16 to a vector or tile, so a product with
   one token costs little more than reading the weights. Every sum runs over the columns in one order,
   in float32, for any number of tokens, outputs and threads.

   The work is split by rows of the weights: `part` of `parts`. */

#include <stdlib.h>

#include "tiles.h"

enum { LANES = 16, TOKENS = 2 * LANES, OUTPUTS = 12, PIECE = 256 };

struct linear {
    const void *x;    /* [rows, inputs] */
    const void *w;    /* [outputs, inputs] */
    const void *bias; /* [outputs], or null */
    void *y;          /* [rows, outputs] */
    int64_t rows, inputs, outputs;
};

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* The start of a share, if `parts` shares of whole steps divide 0 .. count - 1. */
static int64_t share(int64_t count, int64_t step, int64_t part, int64_t parts)
{
    int64_t steps = (count + step - 1) / step;
    return least(steps * part / parts * step, count);
}

/* Rows [count, depth] as [depth][vectors * 16]; missing rows are zero. */
static void pack_floats(const float *rows, int64_t count, int64_t depth, int64_t vectors,
                        float *packed)
{
    for (int64_t c = 0; c < vectors * LANES; c++)
        for (int64_t k = 0; k < depth; k++)
            packed[k * vectors * LANES + c] = c < count ? rows[c * depth + k] : 0.0f;
}

/* Adds `outputs` rows of w times packed tokens to sums; pieces of the columns are summed
   separately, which keeps long sums accurate. `outputs` and `vectors` are constants, so the sums stay
   in registers. */
static inline __attribute__((always_inline)) void
multiply_floats(const float *w, int64_t depth, const float *packed, const int outputs,
                const int vectors, __m512 sums[OUTPUTS][2])
{
    for (int64_t begin = 0; begin < depth; begin += PIECE) {
        int64_t end = least(begin + PIECE, depth);
        __m512 piece[OUTPUTS][2];
        for (int o = 0; o < outputs; o++)
            for (int v = 0; v < vectors; v++)
                piece[o][v] = _mm512_setzero_ps();
        for (int64_t k = begin; k < end; k++) {
            const float *tokens = packed + k * vectors * LANES;
            __m512 x[2];
            for (int v = 0; v < vectors; v++)
                x[v] = _mm512_loadu_ps(tokens + v * LANES);
#pragma GCC unroll 12
            for (int o = 0; o < outputs; o++) {
                __m512 weight = _mm512_set1_ps(w[o * depth + k]);
#pragma GCC unroll 2
                for (int v = 0; v < vectors; v++)
                    piece[o][v] = _mm512_fmadd_ps(weight, x[v], piece[o][v]);
            }
        }
        for (int o = 0; o < outputs; o++)
            for (int v = 0; v < vectors; v++)
                sums[o][v] = _mm512_add_ps(sums[o][v], piece[o][v]);
    }
}

static void store_floats(const struct linear *l, int64_t row, int64_t count, int64_t first,
                         int64_t outputs, __m512 sums[OUTPUTS][2])
{
    const float *bias = l->bias;
    for (int64_t c = 0; c < count; c++) {
        float *y = (float *)l->y + (row + c) * l->outputs + first;
        for (int64_t o = 0; o < outputs; o++) {
            float sum = ((const float *)sums[o])[c];
            y[o] = bias ? sum + bias[first + o] : sum;
        }
    }
}

static void floats(const struct linear *l, int64_t row, int64_t count, const float *packed,
                   int64_t first, int64_t last)
{
    int64_t depth = l->inputs;
    for (int64_t o = first; o < last; o += OUTPUTS) {
        const float *w = (const float *)l->w + o * depth;
        int64_t outputs = least(OUTPUTS, last - o);
        __m512 sums[OUTPUTS][2];
        memset(sums, 0, sizeof sums);
        if (outputs == OUTPUTS && count > LANES)
            multiply_floats(w, depth, packed, OUTPUTS, 2, sums);
        else if (outputs == OUTPUTS)
            multiply_floats(w, depth, packed, OUTPUTS, 1, sums);
        else
            for (int64_t i = 0; i < outputs; i++)
                if (count > LANES)
                    multiply_floats(w + i * depth, depth, packed, 1, 2, sums + i);
                else
                    multiply_floats(w + i * depth, depth, packed, 1, 1, sums + i);
        store_floats(l, row, count, o, outputs, sums);
    }
}

/* float32. 0 on success, 1 without memory. */
int linear_floats(const struct linear *l, int64_t part, int64_t parts)
{
    float *packed = aligned_alloc(64, TOKENS * (l->inputs ? l->inputs : 1) * sizeof(float));
    if (!packed)
        return 1;
    int64_t first = share(l->outputs, OUTPUTS, part, parts);
    int64_t last = share(l->outputs, OUTPUTS, part + 1, parts);
    for (int64_t row = 0; row < l->rows; row += TOKENS) {
        int64_t count = least(TOKENS, l->rows - row);
        const float *x = (const float *)l->x + row * l->inputs;
        pack_floats(x, count, l->inputs, count > LANES ? 2 : 1, packed);
        floats(l, row, count, packed, first, last);
    }
    free(packed);
    return 0;
}

int linear_enable_tiles(void) { return enable_tiles(); }

#ifdef __AMX_BF16__
static void store_tile(const struct linear *l, int64_t row, int64_t count, int64_t first,
                       const float *tile)
{
    for (int64_t c = 0; c < least(count, TILE); c++) {
        __m512 sum = column(tile, c);
        if (l->bias)
            sum = _mm512_add_ps(sum, widen((const bf16 *)l->bias + first));
        bf16 *y = (bf16 *)l->y + (row + c) * l->outputs + first;
        _mm256_storeu_si256((__m256i *)y, (__m256i)_mm512_cvtneps_pbh(sum));
    }
}

/* 32 outputs at a time. The last strips overlap earlier ones and write the same bits again. */
static void tiles(const struct linear *l, int64_t row, int64_t count, const bf16 *packed,
                  int64_t first, int64_t last)
{
    float sums[2][2][TILE * TILE] __attribute__((aligned(64)));
    for (int64_t o = first; o < last; o += 2 * TILE) {
        int64_t at[2] = {least(o, l->outputs - TILE), least(o + TILE, l->outputs - TILE)};
        const bf16 *const w[2] = {(const bf16 *)l->w + at[0] * l->inputs,
                                  (const bf16 *)l->w + at[1] * l->inputs};
        for (int64_t begin = 0; begin < count; begin += 2 * TILE) {
            int64_t left = count - begin;
            multiply(w, l->inputs, packed + begin * l->inputs, left > TILE, sums);
            for (int half = 0; half < 2; half++) {
                store_tile(l, row + begin, left, at[half], sums[half][0]);
                if (left > TILE)
                    store_tile(l, row + begin + TILE, left - TILE, at[half], sums[half][1]);
            }
        }
    }
}

/* bfloat16; inputs are a multiple of 32 and outputs at least 16. 0 on success, 1 without memory. */
int linear_tiles(const struct linear *l, int64_t part, int64_t parts)
{
    bf16 *packed = aligned_alloc(64, CHUNK * l->inputs * sizeof(bf16));
    if (!packed)
        return 1;
    int64_t first = share(l->outputs, 2 * TILE, part, parts);
    int64_t last = share(l->outputs, 2 * TILE, part + 1, parts);
    configure();
    for (int64_t row = 0; row < l->rows; row += CHUNK) {
        int64_t count = least(CHUNK, l->rows - row);
        pack((const bf16 *)l->x + row * l->inputs, count, l->inputs, packed);
        tiles(l, row, count, packed, first, last);
    }
    _tile_release();
    free(packed);
    return 0;
}
#endif
