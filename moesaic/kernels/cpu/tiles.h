/* AMX tiles of bfloat16, shared by the kernels of this folder.

   Weights are the first operand, read in place, 16 rows of 32 columns at a time; tokens are the
   second, 16 to a tile. Every sum runs over the columns in order, in float32. */

#include <immintrin.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

typedef uint16_t bf16;

enum { TILE = 16, DEPTH = 32, CHUNK = 256 };

/* Requests the tiles from the operating system; 0: this process may use them. */
static int enable_tiles(void) { return (int)syscall(SYS_arch_prctl, 0x1023, 18); }

#ifdef __AMX_BF16__
struct tile_config {
    uint8_t palette, start_row, reserved[14];
    uint16_t column_bytes[16];
    uint8_t rows[16];
} __attribute__((packed));

static void configure(void)
{
    struct tile_config config;
    memset(&config, 0, sizeof config);
    config.palette = 1;
    for (int i = 0; i < 8; i++) {
        config.rows[i] = TILE;
        config.column_bytes[i] = 64;
    }
    _tile_loadconfig(&config);
}

/* Rows [count, depth] as tiles [block of 16 rows][depth / 2][16][2]; missing rows are zero. */
static void pack(const bf16 *rows, int64_t count, int64_t depth, bf16 *packed)
{
    int64_t blocks = (count + TILE - 1) / TILE;
    for (int64_t block = 0; block < blocks; block++)
        for (int64_t c = 0; c < TILE; c++) {
            int64_t row = block * TILE + c;
            uint32_t *out = (uint32_t *)packed + block * (depth / 2) * TILE + c;
            const uint32_t *in = (const uint32_t *)(rows + row * depth);
            for (int64_t k = 0; k < depth / 2; k++)
                out[k * TILE] = row < count ? in[k] : 0;
        }
}

/* sums[i][j][r][c] = row r of a[i] times token c of block j, for two pointers into the weights and
   one or two blocks of tokens. */
static void multiply(const bf16 *const a[2], int64_t depth, const bf16 *packed, int two,
                     float sums[2][2][TILE * TILE])
{
    const bf16 *other = packed + depth * TILE;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t k = 0; k < depth; k += DEPTH) {
        _tile_loadd(4, a[0] + k, depth * 2);
        _tile_loadd(5, a[1] + k, depth * 2);
        _tile_loadd(6, packed + k * TILE, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(2, 5, 6);
        if (two) {
            _tile_loadd(7, other + k * TILE, 64);
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, sums[0][0], 64);
    _tile_stored(2, sums[1][0], 64);
    if (two) {
        _tile_stored(1, sums[0][1], 64);
        _tile_stored(3, sums[1][1], 64);
    }
}

static __m512 column(const float *tile, int64_t c)
{
    const __m512i step = _mm512_mullo_epi32(
        _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0),
        _mm512_set1_epi32(TILE));
    return _mm512_i32gather_ps(step, tile + c, 4);
}

static __m512 widen(const bf16 *values)
{
    __m512i bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)values));
    return _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
}
#endif
