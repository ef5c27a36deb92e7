/* The bodies of the CPU kernels for one width of vectors; native.c includes it once a width.

   Expects SUFFIX, TARGET (the function attribute), WIDTH (floats a vector), TILE_ROWS (rows whose sums fit the
   registers) and HEADS (query heads whose sums do). GCC's and Clang's vector extensions, no intrinsics. */

#define JOIN_(a, b) a##_##b
#define JOIN(a, b) JOIN_(a, b)
#define N(name) JOIN(name, SUFFIX)
#define PANEL (2 * WIDTH)

typedef float N(vec) __attribute__((vector_size(WIDTH * 4)));
typedef float N(loose) __attribute__((vector_size(WIDTH * 4), aligned(4)));
typedef int32_t N(ints) __attribute__((vector_size(WIDTH * 4)));
typedef uint32_t N(words) __attribute__((vector_size(WIDTH * 4)));
typedef uint16_t N(halves) __attribute__((vector_size(WIDTH * 2), aligned(2)));

/* ---- Products: y = x @ w, in panels of PANEL outputs ---- */

/* `rows` rows by one panel, over `depth` inputs. What the next tile reads is fetched meanwhile, `step` bytes an input. */
#define TILE(rows)                                                                                                     \
    TARGET static void N(tile##rows)(const float *x, long x_stride, const float *w, float *y, long y_stride,           \
                                     long depth, int fresh, const char *next, long step) {                             \
        N(vec) sum[rows][2];                                                                                           \
        _Pragma("GCC unroll 16") for (int i = 0; i < rows; i++) for (int j = 0; j < 2; j++)                            \
            sum[i][j] = fresh ? (N(vec)){0} : *(const N(loose) *)(y + i * y_stride + j * WIDTH);                       \
        for (long p = 0; p < depth; p++, w += PANEL, next += step) {                                                   \
            N(vec) first = *(const N(vec) *)w, second = *(const N(vec) *)(w + WIDTH);                                  \
            __builtin_prefetch(next, 0, 2);                                                                            \
            if (rows > 2 && step > 64) __builtin_prefetch(next + 64, 0, 2); /* A line has 64 bytes. */                 \
            _Pragma("GCC unroll 16") for (int i = 0; i < rows; i++) {                                                  \
                float value = x[i * x_stride + p];                                                                     \
                sum[i][0] += value * first;                                                                            \
                sum[i][1] += value * second;                                                                           \
            }                                                                                                          \
        }                                                                                                              \
        _Pragma("GCC unroll 16") for (int i = 0; i < rows; i++) for (int j = 0; j < 2; j++)                            \
            *(N(loose) *)(y + i * y_stride + j * WIDTH) = sum[i][j];                                                   \
    }
TILE(1) TILE(2) TILE(3) TILE(4) TILE(5) TILE(6)
#if TILE_ROWS > 6
TILE(7) TILE(8) TILE(9) TILE(10) TILE(11) TILE(12)
#endif

typedef void (*N(tile))(const float *, long, const float *, float *, long, long, int, const char *, long);
static const N(tile) N(tiles)[] = {0, N(tile1), N(tile2), N(tile3), N(tile4), N(tile5), N(tile6),
#if TILE_ROWS > 6
                                   N(tile7), N(tile8), N(tile9), N(tile10), N(tile11), N(tile12)
#endif
};

/* `depth` inputs of one panel for up to ROWS rows. x is padded to `x_stride` so that its rows do not share the sets of a
   cache. Of what comes `next`, `bytes` an input are fetched. */
static void N(part)(const float *x, long x_stride, const float *w, float *y, long y_stride, long rows, long depth,
                    int fresh, const char *next, long bytes) {
    long blocks = (rows + TILE_ROWS - 1) / TILE_ROWS, step = bytes / blocks;
    for (long row = 0, block = 0; block < blocks; block++) {
        long some = (rows - row + blocks - block - 1) / (blocks - block);
        N(tiles)[some](x + row * x_stride, x_stride, w, y + row * y_stride, y_stride, depth, fresh,
                       next + block * depth * step, step);
        row += some;
    }
}

static void N(panel)(const float *x, long x_stride, const float *w, float *y, long y_stride, long rows, long inputs,
                     int fresh) {
    for (long k = 0; k < inputs; k += DEPTH) {
        long depth = inputs - k < DEPTH ? inputs - k : DEPTH;
        const float *part = w + k * PANEL;
        N(part)(x + k, x_stride, part, y, y_stride, rows, depth, fresh && k == 0, (const char *)(part + depth * PANEL),
                PANEL * 4);
    }
}

static void N(panels)(const void *job, long from, long to) {
    const struct product *in = job;
    float edge[ROWS * PANEL];
    for (long o = from * PANEL; o < to * PANEL; o += PANEL) {
        long wide = in->outputs - o < PANEL ? in->outputs - o : PANEL;
        const float *w = in->w + o * in->inputs, *bias = in->bias;
        float *y = in->y + o;
        for (long i = 0; i < in->rows && bias; i++)
            for (long j = 0; j < wide; j++)
                y[i * in->outputs + j] = bias[o + j] + (in->add ? y[i * in->outputs + j] : 0);
        if (wide == PANEL) {
            N(panel)(in->x, in->x_stride, w, y, in->outputs, in->rows, in->inputs, !in->add && !bias);
            continue;
        }
        N(panel)(in->x, in->x_stride, w, edge, PANEL, in->rows, in->inputs, 1);
        for (long i = 0; i < in->rows; i++)
            for (long j = 0; j < wide; j++)
                y[i * in->outputs + j] = edge[i * PANEL + j] + (in->add || bias ? y[i * in->outputs + j] : 0);
    }
}

/* ---- Products of bfloat16 in pairs (`narrow.h`), widened to float ---- */

TARGET static void N(widen_rows)(const void *job, long from, long to) {
    const struct halves *in = job;
    for (long row = from; row < to; row++)
        for (long i = 0; i < 2 * in->pairs; i++) {
            uint32_t wide = (uint32_t)in->x[row * in->x_stride + i] << 16;
            memcpy((float *)in->copy + row * (2 * in->pairs + PADDING) + i, &wide, 4);
        }
}

/* `depth` inputs of a panel, `[depth, PANEL]`. */
TARGET static void N(widen)(const uint16_t *w, float *to, long depth) {
    for (long p = 0; p < depth; p += 2, w += 2 * WIDE, to += 2 * PANEL)
        for (int j = 0; j < 2; j++) {
            N(words) both;
            memcpy(&both, w + j * 2 * WIDTH, sizeof both);
            *(N(words) *)(to + j * WIDTH) = both << 16;
            *(N(words) *)(to + PANEL + j * WIDTH) = both & 0xffff0000;
        }
}

TARGET static void N(panels_floats)(const void *job, long from, long to) {
    const struct halves *in = job;
    long inputs = 2 * in->pairs;
    float sum[ROWS * PANEL], part[DEPTH * PANEL] __attribute__((aligned(64)));
    for (long o = from * WIDE; o < to * WIDE && o < in->outputs; o += PANEL) {
        long wide = in->outputs - o < PANEL ? in->outputs - o : PANEL;
        const uint16_t *w = in->w + o / WIDE * WIDE * inputs + o % WIDE * 2;
        for (long k = 0; k < inputs; k += DEPTH) {
            long depth = inputs - k < DEPTH ? inputs - k : DEPTH;
            N(widen)(w + k * WIDE, part, depth);
            N(part)((const float *)in->copy + k, inputs + PADDING, part, sum, PANEL, in->rows, depth, k == 0,
                    (const char *)(w + (k + depth) * WIDE), WIDE * 2);
        }
        for (long row = 0; row < in->rows; row++)
            for (long j = 0; j < wide; j++)
                in->y[row * in->outputs + o + j] = nearest(sum[row * PANEL + j] + (in->bias ? in->bias[o + j] : 0));
    }
}

/* ---- Decode attention, norms and activations ---- */

#define LOW(lane, half) (((lane) & (half) ? WIDTH : 0) + ((lane) & ~(2 * (half) - 1)) + ((lane) & ((half) - 1)))
#define HIGH(lane, half) (LOW(lane, half) + (half))
#define EIGHT(from, first, half)                                                                                       \
    from(first, half), from(first + 1, half), from(first + 2, half), from(first + 3, half), from(first + 4, half),     \
        from(first + 5, half), from(first + 6, half), from(first + 7, half)
#if WIDTH == 16
#define LANES(from, half) EIGHT(from, 0, half), EIGHT(from, 8, half)
#else
#define LANES(from, half) EIGHT(from, 0, half)
#endif
#define FOLD(half)                                                                                                     \
    _Pragma("GCC unroll 8") for (int i = 0; i < half; i++)                                                             \
        v[i] = __builtin_shufflevector(v[i], v[i + half], LANES(LOW, half)) +                                          \
               __builtin_shufflevector(v[i], v[i + half], LANES(HIGH, half));

/* The sums of WIDTH vectors, as one; the vectors are overwritten. */
TARGET static inline N(vec) N(totals)(N(vec) *v) {
#if WIDTH == 16
    FOLD(8)
#endif
    FOLD(4) FOLD(2) FOLD(1)
    return v[0];
}

TARGET static inline N(vec) N(larger)(N(vec) a, N(vec) b) {
    N(ints) first = a > b;
    return (N(vec))(((N(ints))a & first) | ((N(ints))b & ~first));
}

/* e^x for x <= 0, within 2 units in the last place; 0 below -87. Cody and Waite's reduction, Cephes' polynomial. */
TARGET static inline N(vec) N(exp)(N(vec) x) {
    N(ints) low = x < -87.0f;
    const N(vec) magic = (N(vec)){0} + 12582912.0f;
    N(vec) n = (x * 1.44269504f + magic) - magic;
    N(vec) r = x - n * 0.693359375f + n * 2.12194440e-4f;
    N(vec) y = ((((1.9875691500e-4f * r + 1.3981999507e-3f) * r + 8.3334519073e-3f) * r + 4.1665795894e-2f) * r +
                1.6666665459e-1f) * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.0f;
    N(ints) power = (__builtin_convertvector(n, N(ints)) + 127) << 23;
    return (N(vec))((N(ints))(y * (N(vec))power) & ~low);
}

/* x / sqrt(mean(x^2) + eps) * w. */
TARGET static void N(norm_rows)(const void *job, long from, long to) {
    const struct elements *in = job;
    for (long row = from; row < to; row++) {
        const float *x = in->x + row / in->heads * in->x_stride + row % in->heads * in->x_head_stride;
        float *y = in->y + row / in->heads * in->y_stride + row % in->heads * in->y_head_stride, total = 0;
        N(vec) sum[4] = {{0}};
        long i = 0;
        for (; i + 4 * WIDTH <= in->size; i += 4 * WIDTH)
            for (int j = 0; j < 4; j++) {
                N(vec) value = *(const N(loose) *)(x + i + j * WIDTH);
                sum[j] += value * value;
            }
        sum[0] = sum[0] + sum[1] + (sum[2] + sum[3]);
        for (int j = 0; j < WIDTH; j++) total += sum[0][j];
        for (long j = i; j < in->size; j++) total += x[j] * x[j];
        float scale = 1 / sqrtf(total / in->size + in->eps);
        for (i = 0; i + WIDTH <= in->size; i += WIDTH)
            *(N(loose) *)(y + i) = *(const N(loose) *)(x + i) * scale * *(const N(loose) *)(in->w + i);
        for (; i < in->size; i++) y[i] = x[i] * scale * in->w[i];
    }
}

/* SiLU of the first half of a row, times the second one. */
TARGET static void N(gate_rows)(const void *job, long from, long to) {
    const struct elements *in = job;
    for (long row = from; row < to; row++) {
        const float *gate = in->x + row * in->x_stride, *up = gate + in->size;
        float *y = in->y + row * in->y_stride;
        for (long i = 0; i < in->size; i += WIDTH) {
            long some = in->size - i < WIDTH ? in->size - i : WIDTH;
            N(vec) g = {0}, u = {0};
            if (some == WIDTH) g = *(const N(loose) *)(gate + i), u = *(const N(loose) *)(up + i);
            else memcpy(&g, gate + i, 4 * some), memcpy(&u, up + i, 4 * some);
            N(vec) e = N(exp)(-N(larger)(g, -g)), one = (N(vec)){0} + 1;
            N(ints) below = g < 0;
            N(vec) part = (N(vec))(((N(ints))e & below) | ((N(ints))one & ~below));
            g = g * part / (one + e) * u;
            if (some == WIDTH) *(N(loose) *)(y + i) = g;
            else memcpy(y + i, &g, 4 * some);
        }
    }
}

TARGET static inline N(vec) N(load_float)(const float *p) { return *(const N(loose) *)p; }
TARGET static inline N(vec) N(load_bfloat16)(const uint16_t *p) {
    return (N(vec))(__builtin_convertvector(*(const N(halves) *)p, N(words)) << 16);
}

/* Rows of keys or values that are read after those at hand. */
struct N(rows_float) { const float *rows; const int64_t *slot; long count; };
struct N(rows_bfloat16) { const uint16_t *rows; const int64_t *slot; long count; };
#define LATER(own, at, left_)                                                                                          \
    (at) < (left_) ? own + slot[at] * dim                                                                              \
                   : then.rows + then.slot[(at) - (left_) < then.count ? (at) - (left_) : then.count - 1] * dim

/* Scores of `heads` queries and all keys, each key read once: WIDTH sums at a time. Past the last key, its score. */
#define SCORES(heads, type)                                                                                            \
    TARGET static void N(scores_##type##heads)(const float *q, const type##_ *keys, const int64_t *slot, long count,   \
                                               long dim, float *score, long score_stride,                              \
                                               struct N(rows_##type) then) {                                           \
        enum { some = WIDTH / heads };                                                                                 \
        for (long c = 0; c < count; c += some) {                                                                       \
            const type##_ *key[some];                                                                                  \
            N(vec) sum[WIDTH];                                                                                         \
            _Pragma("GCC unroll 16") for (int i = 0; i < some; i++) {                                                  \
                key[i] = keys + slot[c + i < count ? c + i : count - 1] * dim;                                         \
                const type##_ *later = LATER(keys, c + i + AHEAD, count);                                              \
                for (long d = 0; d < dim; d += 64 / (long)sizeof(type##_)) __builtin_prefetch(later + d);     \
            }                                                                                                          \
            _Pragma("GCC unroll 16") for (int i = 0; i < WIDTH; i++) sum[i] = (N(vec)){0};                             \
            for (long d = 0; d < dim; d += WIDTH) {                                                                    \
                _Pragma("GCC unroll 16") for (int i = 0; i < some; i++) {                                              \
                    N(vec) part = N(load_##type)(key[i] + d);                                                          \
                    _Pragma("GCC unroll 4") for (int g = 0; g < heads; g++)                                            \
                        sum[g * some + i] += part * N(load_float)(q + g * dim + d);                                    \
                }                                                                                                      \
            }                                                                                                          \
            N(vec) found = N(totals)(sum);                                                                             \
            _Pragma("GCC unroll 4") for (int g = 0; g < heads; g++)                                                    \
                memcpy(score + g * score_stride + c, (float *)&found + g * some, some * 4);                            \
        }                                                                                                              \
    }
/* The sum of values by weight, `heads` queries, WIDTH dimensions times `vectors`. */
#define VALUES(heads, vectors, type)                                                                                   \
    TARGET static void N(values_##type##heads##_##vectors)(const type##_ *values, const int64_t *slot, long count,     \
                                                           long dim, const float *weight, long stride, float *out,     \
                                                           long left, struct N(rows_##type) then) {                    \
        N(vec) sum[heads][vectors];                                                                                    \
        _Pragma("GCC unroll 4") for (int g = 0; g < heads; g++) _Pragma("GCC unroll 4") for (int j = 0; j < vectors; j++)\
            sum[g][j] = N(load_float)(out + g * dim + j * WIDTH);                                                      \
        for (long c = 0; c < count; c++) {                                                                             \
            const type##_ *value = values + slot[c] * dim;                                                             \
            const type##_ *later = LATER(values, c + AHEAD, left);                                                     \
            for (int j = 0; j < vectors * WIDTH; j += 64 / (int)sizeof(type##_)) __builtin_prefetch(later + j);\
            _Pragma("GCC unroll 4") for (int j = 0; j < vectors; j++) {                                                \
                N(vec) part = N(load_##type)(value + j * WIDTH);                                                       \
                _Pragma("GCC unroll 4") for (int g = 0; g < heads; g++) sum[g][j] += weight[g * stride + c] * part;    \
            }                                                                                                          \
        }                                                                                                              \
        _Pragma("GCC unroll 4") for (int g = 0; g < heads; g++) _Pragma("GCC unroll 4") for (int j = 0; j < vectors; j++)\
            *(N(loose) *)(out + g * dim + j * WIDTH) = sum[g][j];                                                      \
    }

/* In place: weights of a softmax whose sum a sink may share. The rest of the last vector is written, too. */
TARGET static void N(softmax)(float *score, long count, float scale, const float *bias, const float *sink) {
    long padded = (count + WIDTH - 1) / WIDTH * WIDTH;
    for (long c = count; c < padded; c++) score[c] = score[count - 1];
    for (long c = 0; c < padded; c += WIDTH) *(N(loose) *)(score + c) = N(load_float)(score + c) * scale;
    for (long c = 0; c < count && bias; c++) score[c] += bias[c];
    for (long c = count; c < padded; c++) score[c] = score[count - 1];
    N(vec) largest_of = N(load_float)(score), sums = {0};
    for (long c = WIDTH; c < padded; c += WIDTH) largest_of = N(larger)(largest_of, N(load_float)(score + c));
    float largest = sink ? *sink : largest_of[0], sum = 0;
    for (int i = 0; i < WIDTH; i++) largest = largest_of[i] > largest ? largest_of[i] : largest;
    for (long c = count; c < padded; c++) score[c] = -INFINITY;
    for (long c = 0; c < padded; c += WIDTH) {
        N(vec) part = N(exp)(N(load_float)(score + c) - largest);
        *(N(loose) *)(score + c) = part;
        sums += part;
    }
    for (int i = 0; i < WIDTH; i++) sum += sums[i];
    float share = 1 / (sum + (sink ? expf(*sink - largest) : 0));
    for (long c = 0; c < padded; c += WIDTH) *(N(loose) *)(score + c) = N(load_float)(score + c) * share;
}

#define ATTEND(type)                                                                                                   \
    SCORES(1, type) SCORES(2, type) SCORES(4, type)                                                                    \
    VALUES(1, 1, type) VALUES(2, 1, type) VALUES(1, 4, type) VALUES(2, 4, type)                                        \
    VALUES(4, 1, type) VALUES(4, 4, type)                                                                              \
    static void N(attend_##type)(const void *job, long from, long to) {                                                \
        const struct decode *in = job;                                                                                 \
        static void (*const scores[])(const float *, const type##_ *, const int64_t *, long, long, float *, long, struct N(rows_##type)) = {\
            N(scores_##type##1), N(scores_##type##2), N(scores_##type##4)};                                            \
        static void (*const values[][2])(const type##_ *, const int64_t *, long, long, const float *, long, float *, long, struct N(rows_##type)) =\
            {{N(values_##type##1_1), N(values_##type##1_4)}, {N(values_##type##2_1), N(values_##type##2_4)},           \
             {N(values_##type##4_1), N(values_##type##4_4)}};                                                          \
        long dim = in->dim, group = in->heads / in->kv_heads, total = 0;                                               \
        float *score = in->scratch + from * HEADS_AT_ONCE * in->score_stride;                                          \
        const int64_t *slot = in->slots;                                                                               \
        const float *bias = in->bias;                                                                                  \
        for (long b = 0; b < in->batch; total += in->counts[b], slot += in->counts[b], b++) {                          \
            long count = in->counts[b];                                                                                \
            /* The tokens before a head's keys, all heads of a sequence one after another, say whose they are. */      \
            for (long head = 0; head < in->heads;) {                                                                   \
                long kv = head / group, left = (kv + 1) * group - head;                                                \
                int two = left < HEADS ? left / 2 : HEADS / 2, some = two ? 2 * two : 1; /* 1, 2 or 4 */               \
                long at = (total * in->kv_heads + kv * count) * in->threads / (in->tokens * in->kv_heads);             \
                if (at < from || at >= to) { head += some; continue; }                                                 \
                const type##_ *keys = (const type##_ *)in->keys + kv * in->num_slots * dim;                            \
                const type##_ *vals = (const type##_ *)in->values + kv * in->num_slots * dim;                          \
                float *out = in->out + (b * in->heads + head) * dim;                                                   \
                scores[two](in->q + b * in->q_stride + head * dim, keys, slot, count, dim, score, in->score_stride,    \
                            (struct N(rows_##type)){vals, slot, count});                                               \
                int more = head + some < in->heads, last = !more && b + 1 == in->batch;                                \
                long next = (more ? (head + some) / group : 0) * in->num_slots * dim;                                  \
                struct N(rows_##type) then = {last ? vals : (const type##_ *)in->keys + next,                          \
                                              more || last ? slot : slot + count,                                      \
                                              more || last ? count : in->counts[b + 1]};                               \
                for (long g = 0; g < some; g++)                                                                        \
                    N(softmax)(score + g * in->score_stride, count, in->scale, bias ? bias + (head + g) * count : 0,   \
                               in->sinks ? in->sinks + head + g : 0);                                                  \
                memset(out, 0, some * dim * 4);                                                                        \
                for (long c = 0; c < count; c += TOKENS) {                                                             \
                    long part = count - c < TOKENS ? count - c : TOKENS, d = 0;                                        \
                    for (; d + 4 * WIDTH <= dim; d += 4 * WIDTH, then.rows += 4 * WIDTH)                               \
                        values[two][1](vals + d, slot + c, part, dim, score + c, in->score_stride, out + d, count - c, \
                                       then);                                                                          \
                    for (; d < dim; d += WIDTH, then.rows += WIDTH)                                                    \
                        values[two][0](vals + d, slot + c, part, dim, score + c, in->score_stride, out + d, count - c, \
                                       then);                                                                          \
                    then.rows -= dim;                                                                                  \
                }                                                                                                      \
                head += some;                                                                                          \
            }                                                                                                          \
            if (bias) bias += in->heads * count;                                                                       \
        }                                                                                                              \
    }
ATTEND(float)
ATTEND(bfloat16)

#undef TILE
#undef FOLD
#undef LATER
#undef LANES
#undef EIGHT
#undef HIGH
#undef LOW
#undef SCORES
#undef VALUES
#undef ATTEND
#undef PANEL
#undef N
#undef JOIN
#undef JOIN_
