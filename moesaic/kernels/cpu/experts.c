/* Feed-forward networks of experts in bfloat16 with AMX tiles.

   Weights are read once, in place, 16 rows of 32 columns at a time; tokens are the other operand, 16
   to a tile, so a product with one token costs as much as one with 16: reading the weights. Every sum
   runs over the columns in order, in float32, so the bits of a row depend on that row alone.

   slots, starts, rows: each job's expert, its first row in x, h and y, and its number of rows.
   The work of every job is split by rows of the weights: `part` of `parts`. */

#include <stdlib.h>

#include "tiles.h"

enum { SILU = 0, CLAMPED_SWIGLU = 1 };

struct experts {
    const int64_t *slots, *starts, *rows;
    int64_t jobs;
    const bf16 *w13, *w2, *b13, *b2; /* [e, 2I, H], [e, H, I], [e, 2I], [e, H]; biases may be null */
    const bf16 *x;                   /* [Y, H] */
    bf16 *h, *y;                     /* [Y, I], [Y, H] */
    int64_t hidden, inner;
    int32_t activation;
    float alpha, limit;
};

int experts_enable(void) { return enable_tiles(); }

static void narrow(__m512 values, bf16 *out)
{
    _mm256_storeu_si256((__m256i *)out, (__m256i)_mm512_cvtneps_pbh(values));
}

/* e^x by 2^n * e^r with |r| <= ln(2) / 2 and a Taylor polynomial: within 3e-7 of the true value,
   infinite from 89 on. */
static __m512 exponential(__m512 x)
{
    static const float terms[] = {1.0f / 5040, 1.0f / 720, 1.0f / 120, 1.0f / 24,
                                  1.0f / 6,    0.5f,       1.0f,       1.0f};
    x = _mm512_min_ps(x, _mm512_set1_ps(200.0f));
    x = _mm512_max_ps(x, _mm512_set1_ps(-200.0f));
    __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    __m512 sum = _mm512_set1_ps(terms[0]);
    for (int i = 1; i < 8; i++)
        sum = _mm512_fmadd_ps(sum, r, _mm512_set1_ps(terms[i]));
    return _mm512_scalef_ps(sum, n);
}

/* x / (1 + e^(-scale * x)); keeps NaN. */
static __m512 swish(__m512 x, float scale)
{
    __m512 bottom = exponential(_mm512_mul_ps(x, _mm512_set1_ps(-scale)));
    return _mm512_div_ps(x, _mm512_add_ps(bottom, _mm512_set1_ps(1.0f)));
}

static __m512 activate(const struct experts *e, __m512 gate, __m512 up)
{
    if (e->activation == SILU)
        return _mm512_mul_ps(swish(gate, 1.0f), up);
    __m512 limit = _mm512_set1_ps(e->limit);
    gate = _mm512_min_ps(limit, gate);
    up = _mm512_max_ps(_mm512_sub_ps(_mm512_setzero_ps(), limit), _mm512_min_ps(limit, up));
    return _mm512_mul_ps(swish(gate, e->alpha), _mm512_add_ps(up, _mm512_set1_ps(1.0f)));
}

static int64_t tokens_of(int64_t count, int64_t block)
{
    int64_t left = count - block * TILE;
    return left < TILE ? left : TILE;
}

/* h = activation(gate x, up x): rows of gate and up side by side. */
static void inward(const struct experts *e, int64_t slot, const bf16 *packed, int64_t count,
                   bf16 *h, int64_t first, int64_t last)
{
    int64_t hidden = e->hidden, inner = e->inner;
    const bf16 *w = e->w13 + slot * 2 * inner * hidden;
    const bf16 *bias = e->b13 ? e->b13 + slot * 2 * inner : 0;
    float sums[2][2][TILE * TILE] __attribute__((aligned(64)));
    for (int64_t i = first; i < last; i += TILE) {
        const bf16 *const rows[2] = {w + i * hidden, w + (inner + i) * hidden};
        for (int64_t block = 0; block * TILE < count; block += 2) {
            int two = (block + 1) * TILE < count;
            multiply(rows, hidden, packed + block * TILE * hidden, two, sums);
            for (int64_t j = 0; j <= two; j++)
                for (int64_t c = 0; c < tokens_of(count, block + j); c++) {
                    __m512 gate = column(sums[0][j], c), up = column(sums[1][j], c);
                    if (bias) {
                        gate = _mm512_add_ps(gate, widen(bias + i));
                        up = _mm512_add_ps(up, widen(bias + inner + i));
                    }
                    narrow(activate(e, gate, up), h + ((block + j) * TILE + c) * inner + i);
                }
        }
    }
}

/* y = down h: 32 rows at a time. */
static void outward(const struct experts *e, int64_t slot, const bf16 *packed, int64_t count,
                    bf16 *y, int64_t first, int64_t last)
{
    int64_t hidden = e->hidden, inner = e->inner;
    const bf16 *w = e->w2 + slot * hidden * inner;
    const bf16 *bias = e->b2 ? e->b2 + slot * hidden : 0;
    float sums[2][2][TILE * TILE] __attribute__((aligned(64)));
    for (int64_t n = first; n < last; n += 2 * TILE) {
        const bf16 *const rows[2] = {w + n * inner, w + (n + TILE) * inner};
        for (int64_t block = 0; block * TILE < count; block += 2) {
            int two = (block + 1) * TILE < count;
            multiply(rows, inner, packed + block * TILE * inner, two, sums);
            for (int64_t half = 0; half < 2; half++)
                for (int64_t j = 0; j <= two; j++)
                    for (int64_t c = 0; c < tokens_of(count, block + j); c++) {
                        int64_t at = n + half * TILE;
                        __m512 sum = column(sums[half][j], c);
                        if (bias)
                            sum = _mm512_add_ps(sum, widen(bias + at));
                        narrow(sum, y + ((block + j) * TILE + c) * hidden + at);
                    }
        }
    }
}

typedef void stage(const struct experts *, int64_t, const bf16 *, int64_t, bf16 *, int64_t, int64_t);

static int run(const struct experts *e, stage *compute, const bf16 *in, bf16 *out, int64_t depth,
               int64_t width, int64_t step, int64_t part, int64_t parts)
{
    bf16 *packed = aligned_alloc(64, CHUNK * depth * sizeof(bf16));
    if (!packed)
        return 1;
    int64_t blocks = width / step;
    int64_t first = blocks * part / parts * step, last = blocks * (part + 1) / parts * step;
    configure();
    for (int64_t job = 0; job < e->jobs; job++)
        for (int64_t done = 0; done < e->rows[job]; done += CHUNK) {
            int64_t row = e->starts[job] + done, count = e->rows[job] - done;
            count = count < CHUNK ? count : CHUNK;
            pack(in + row * depth, count, depth, packed);
            compute(e, e->slots[job], packed, count, out + row * width, first, last);
        }
    _tile_release();
    free(packed);
    return 0;
}

/* The first products and the activation: x -> h. 0 on success, 1 without memory. */
int experts_inward(const struct experts *e, int64_t part, int64_t parts)
{
    return run(e, inward, e->x, e->h, e->hidden, e->inner, TILE, part, parts);
}

/* The last products: h -> y, after all parts of h. */
int experts_outward(const struct experts *e, int64_t part, int64_t parts)
{
    return run(e, outward, e->h, e->y, e->inner, e->hidden, 2 * TILE, part, parts);
}
