/* Products of packed weights, and decode attention over cached keys and values, on the threads of a CPU.

   A module of Python's stable ABI; pointers come from tensors' `data_ptr`. `kernels/native/__init__.py` says what each
   function takes, and checks it. Vectors of AVX-512 or of AVX2 with FMA, by what the processor has; other processors
   take torch's operations. Threads are those of the OpenMP library that torch has loaded, so that one pool serves both;
   which of them computes an output changes none of its bits. Not here: how many (torch's own number). */
#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#if defined(__linux__)
#include <dlfcn.h>
#endif
#include <math.h>
#include <stdint.h>
#include <string.h>

enum { DEPTH = 256, ROWS = 480, PADDING = 16, AHEAD = 16, TOKENS = 64, HEADS_AT_ONCE = 4 };
enum { WIDE = 32, TILE_HEIGHT = 16, TILE_BYTES = 64 };
typedef float float_;
typedef uint16_t bfloat16_;

struct product {
    const float *x, *w, *bias;
    float *y;
    long x_stride, rows, inputs, outputs;
    int add;
};

/* Weights in pairs (`narrow.h`), rows as they came and as the product at hand takes them. */
struct halves {
    const uint16_t *x, *w;
    const float *bias;
    uint16_t *y;
    void *copy;
    long x_stride, rows, pairs, outputs;
};

/* Rows, of `heads` each, whose elements are adjacent. */
struct elements {
    const float *x, *w;
    float *y;
    long x_stride, x_head_stride, y_stride, y_head_stride, heads, size;
    float eps;
};

struct decode {
    const float *q, *bias, *sinks;
    const void *keys, *values;
    const int64_t *slots, *counts;
    float *out, *scratch;
    long batch, heads, kv_heads, dim, q_stride, num_slots, score_stride, threads, tokens;
    float scale;
};

#if defined(__x86_64__) && defined(__GNUC__)
/* In bfloat16, the nearest, of two the even one. */
static inline uint16_t nearest(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return value == value ? (bits + 0x7fff + (bits >> 16 & 1)) >> 16 : 0x7fc0;
}

#define SUFFIX avx512
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx2,fma")))
#define WIDTH 16
#define TILE_ROWS 12
#define HEADS 4
#include "simd.h"
#undef SUFFIX
#undef TARGET
#undef WIDTH
#undef TILE_ROWS
#undef HEADS
#define SUFFIX avx2
#define TARGET __attribute__((target("avx2,fma")))
#define WIDTH 8
#define TILE_ROWS 6
#define HEADS 2
#include "simd.h"
#include "narrow.h"
#include "tiles.h"

static long widest(void) {
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl"))
        return 16;
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? 8 : 0;
}

/* Whether the processor multiplies integers of 8 bits, and pairs of bfloat16. */
static int integers_(void) {
    return widest() == 16 && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni");
}
static int pairs_(void) { return integers_() && __builtin_cpu_supports("avx512bf16"); }

/* ---- Threads ---- */

typedef void (*work_)(const void *job, long from, long to);
struct spread {
    work_ work;
    const void *job;
    long items;
};
static void (*parallel)(void (*)(void *), void *, unsigned, unsigned);
static int (*thread_num)(void), (*num_threads)(void);

/* The OpenMP library of the process, if it has one. */
static int find_threads(void) {
#if defined(__linux__)
    *(void **)&thread_num = dlsym(RTLD_DEFAULT, "omp_get_thread_num");
    *(void **)&num_threads = dlsym(RTLD_DEFAULT, "omp_get_num_threads");
    *(void **)&parallel = dlsym(RTLD_DEFAULT, "GOMP_parallel");
#endif
    return parallel && thread_num && num_threads;
}

static void own_part(void *all) {
    const struct spread *in = all;
    long thread = thread_num(), threads = num_threads();
    long from = in->items * thread / threads, to = in->items * (thread + 1) / threads;
    if (from < to) in->work(in->job, from, to);
}

/* All items, in one part a thread. */
static void spread(work_ work, const void *job, long items, long threads) {
    struct spread all = {work, job, items};
    threads = threads < items ? threads : items;
    if (threads > 1) parallel(own_part, &all, threads, 0);
    else work(job, 0, items);
}

/* ---- What Python calls ---- */

/* Ways to multiply bfloat16. */
enum { FLOATS, PAIRS, TILES };

/* The arguments as integers; a pointer is one. */
static int parse(PyObject *const *args, Py_ssize_t given, long long *into, Py_ssize_t expected) {
    if (given < expected) {
        PyErr_Format(PyExc_TypeError, "%zd arguments instead of %zd", given, expected);
        return -1;
    }
    for (Py_ssize_t i = 0; i < expected; i++) {
        into[i] = PyLong_AsLongLong(args[i]);
        if (into[i] == -1 && PyErr_Occurred()) return -1;
    }
    return 0;
}

/* Rows of that many bytes that a cache of 1 MiB holds, in whole blocks of every kernel: 96 at least, ROWS at most. */
static long most_rows(long bytes) {
    long fit = (1 << 20) / bytes / 96 * 96;
    return fit < 96 ? 96 : fit < ROWS ? fit : ROWS;
}

/* linear(width, threads, x, x_stride, weight, bias, y, scratch, rows, inputs, outputs, add) */
static PyObject *linear(PyObject *self, PyObject *const *args, Py_ssize_t given) {
    long long a[12];
    if (parse(args, given, a, 12)) return NULL;
    long rows = a[8], inputs = a[9], outputs = a[10], panel = 2 * a[0], most = most_rows(4 * inputs);
    float *x = (float *)a[2], *y = (float *)a[6], *copy = (float *)a[7];
    struct product in = {.x = copy, .x_stride = inputs + PADDING, .w = (float *)a[4], .bias = (float *)a[5],
                         .inputs = inputs, .outputs = outputs, .add = (int)a[11]};
    Py_BEGIN_ALLOW_THREADS;
    for (long row = 0; row < rows; row += most) {
        in.rows = rows - row < most ? rows - row : most;
        in.y = y + row * outputs;
        for (long i = 0; i < in.rows; i++) memcpy(copy + i * in.x_stride, x + (row + i) * a[3], inputs * 4);
        spread(a[0] == 16 ? panels_avx512 : panels_avx2, &in, (outputs + panel - 1) / panel, a[1]);
    }
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

/* linear_halves(way, width, threads, x, x_stride, weight, bias, y, scratch, rows, inputs, outputs) */
static PyObject *linear_halves(PyObject *self, PyObject *const *args, Py_ssize_t given) {
    long long a[12];
    if (parse(args, given, a, 12)) return NULL;
    struct halves in = {.x_stride = a[4], .w = (uint16_t *)a[5], .bias = (float *)a[6], .copy = (void *)a[8],
                        .pairs = a[10] / 2, .outputs = a[11]};
    long rows = a[9], panels = (in.outputs + WIDE - 1) / WIDE, most = rows;
    if (a[0] == FLOATS) most = most_rows(4 * a[10]);
    if (a[0] == TILES) most = most_rows(2 * a[10]);
    Py_BEGIN_ALLOW_THREADS;
    for (long row = 0; row < rows; row += most) {
        in.rows = rows - row < most ? rows - row : most;
        in.x = (uint16_t *)a[3] + row * in.x_stride;
        in.y = (uint16_t *)a[7] + row * in.outputs;
        if (a[0] == FLOATS) {
            spread(a[1] == 16 ? widen_rows_avx512 : widen_rows_avx2, &in, in.rows, a[2]);
            spread(a[1] == 16 ? panels_floats_avx512 : panels_floats_avx2, &in, panels, a[2]);
        } else if (a[0] == TILES) {
            spread(to_tiles, &in, (in.rows + TILE_HEIGHT - 1) / TILE_HEIGHT, a[2]);
            spread(panels_tiles, &in, panels, a[2]);
        } else spread(panels_pairs, &in, panels, a[2]);
    }
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

/* linear_integers(tiled, threads, half, bits, digits, x, x_stride, weight, zeros, scales, bias, y, scratch, rows, inputs,
   outputs, groups, group_size) */
static PyObject *linear_integers(PyObject *self, PyObject *const *args, Py_ssize_t given) {
    long long a[18];
    if (parse(args, given, a, 18)) return NULL;
    long rows = a[13], most = ROWS / a[4], bytes = a[2] ? 2 : 4;
    most = rows < most ? rows : most;
    struct integers in = {.tiled = (int)a[0], .half = (int)a[2], .bits = (int)a[3], .digits = (int)a[4],
                          .x_stride = a[6], .w = (uint8_t *)a[7], .zeros = (uint8_t *)a[8], .scales = (float *)a[9],
                          .bias = (float *)a[10], .inputs = a[14], .outputs = a[15], .groups = a[16],
                          .group_size = a[17], .stride = (a[14] + 3) / 4 * 4};
    in.digit = (int8_t *)a[12];
    in.row_scale = (float *)(in.digit + (most * in.digits + TILE_HEIGHT - 1) / TILE_HEIGHT * TILE_HEIGHT * in.stride);
    in.total = (int32_t *)(in.row_scale + most);
    Py_BEGIN_ALLOW_THREADS;
    for (long row = 0; row < rows; row += most) {
        in.rows = rows - row < most ? rows - row : most;
        in.x = (char *)a[5] + row * in.x_stride * bytes;
        in.y = (char *)a[11] + row * in.outputs * bytes;
        spread(to_digits, &in, in.rows, a[1]);
        spread(in.tiled ? panels_integers_tiles : panels_integers, &in, (in.outputs + WIDE - 1) / WIDE, a[1]);
    }
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

/* norm(width, threads, x, x_stride, x_head_stride, weight, y, y_stride, y_head_stride, rows, heads, size, eps) */
static PyObject *norm(PyObject *self, PyObject *const *args, Py_ssize_t given) {
    long long a[12];
    if (parse(args, given, a, 12)) return NULL;
    double eps = given > 12 ? PyFloat_AsDouble(args[12]) : 0;
    if (PyErr_Occurred()) return NULL;
    struct elements in = {.x = (float *)a[2], .x_stride = a[3], .x_head_stride = a[4], .w = (float *)a[5],
                          .y = (float *)a[6], .y_stride = a[7], .y_head_stride = a[8], .heads = a[10], .size = a[11],
                          .eps = (float)eps};
    Py_BEGIN_ALLOW_THREADS;
    spread(a[0] == 16 ? norm_rows_avx512 : norm_rows_avx2, &in, a[9] * a[10], a[1]);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

/* gate(width, threads, x, x_stride, y, rows, size) */
static PyObject *gate(PyObject *self, PyObject *const *args, Py_ssize_t given) {
    long long a[7];
    if (parse(args, given, a, 7)) return NULL;
    struct elements in = {.x = (float *)a[2], .x_stride = a[3], .y = (float *)a[4], .y_stride = a[6], .size = a[6]};
    Py_BEGIN_ALLOW_THREADS;
    spread(a[0] == 16 ? gate_rows_avx512 : gate_rows_avx2, &in, a[5], a[1]);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

/* decode(width, threads, half, q, q_stride, keys, values, num_slots, slots, counts, bias, sinks, out, scratch,
   score_stride, batch, heads, kv_heads, dim, tokens, scale) */
static PyObject *decode(PyObject *self, PyObject *const *args, Py_ssize_t given) {
    long long a[20];
    if (parse(args, given, a, 20)) return NULL;
    double scale = given > 20 ? PyFloat_AsDouble(args[20]) : 0;
    if (PyErr_Occurred()) return NULL;
    struct decode in = {
        .threads = a[1], .q = (float *)a[3], .q_stride = a[4], .keys = (void *)a[5], .values = (void *)a[6],
        .num_slots = a[7], .slots = (int64_t *)a[8], .counts = (int64_t *)a[9], .bias = (float *)a[10],
        .sinks = (float *)a[11], .out = (float *)a[12], .scratch = (float *)a[13], .score_stride = a[14],
        .batch = a[15], .heads = a[16], .kv_heads = a[17], .dim = a[18], .tokens = a[19], .scale = (float)scale};
    Py_BEGIN_ALLOW_THREADS;
    if (a[0] == 16) spread(a[2] ? attend_bfloat16_avx512 : attend_float_avx512, &in, a[1], a[1]);
    else spread(a[2] ? attend_bfloat16_avx2 : attend_float_avx2, &in, a[1], a[1]);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

static PyObject *width(PyObject *self, PyObject *none) { return PyLong_FromLong(widest()); }
static PyObject *integers(PyObject *self, PyObject *none) { return PyBool_FromLong(integers_()); }
static PyObject *pairs(PyObject *self, PyObject *none) { return PyBool_FromLong(pairs_()); }
static PyObject *tiles(PyObject *self, PyObject *none) { return PyBool_FromLong(pairs_() && tiles_()); }
static PyObject *threads(PyObject *self, PyObject *none) { return PyBool_FromLong(find_threads()); }
#define CALLED(name, how) {#name, (PyCFunction)(void (*)(void))name, how, NULL}
static PyMethodDef methods[] = {CALLED(width, METH_NOARGS), CALLED(integers, METH_NOARGS), CALLED(pairs, METH_NOARGS),
                                CALLED(tiles, METH_NOARGS), CALLED(threads, METH_NOARGS), CALLED(linear, METH_FASTCALL),
                                CALLED(linear_halves, METH_FASTCALL), CALLED(linear_integers, METH_FASTCALL),
                                CALLED(norm, METH_FASTCALL), CALLED(gate, METH_FASTCALL),
                                CALLED(decode, METH_FASTCALL), {NULL, NULL, 0, NULL}};
#else
static PyObject *width(PyObject *self, PyObject *none) { return PyLong_FromLong(0); }
static PyMethodDef methods[] = {{"width", width, METH_NOARGS, NULL}, {NULL, NULL, 0, NULL}};
#endif

static PyModuleDef_Slot slots[] = {{0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_native", NULL, 0, methods, slots, NULL, NULL, NULL};
PyMODINIT_FUNC PyInit__native(void) { return PyModuleDef_Init(&module); }
