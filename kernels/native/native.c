/* Products of packed float32 weights, and decode attention over cached keys and values, on one thread of a CPU.

   A module of Python's stable ABI; pointers come from tensors' `data_ptr`. `kernels/native/__init__.py` says what each
   function takes, and checks it. Vectors of AVX-512 or of AVX2 with FMA, by what the processor has; other processors
   take torch's operations. Not here: threads. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

enum { DEPTH = 256, ROWS = 480, PADDING = 16, AHEAD = 12, TOKENS = 64 };
typedef float float_;
typedef uint16_t bfloat16_;

struct decode {
    const float *q, *bias, *sinks;
    const void *keys, *values;
    const int64_t *slots, *counts;
    float *out, *scratch;
    long batch, heads, kv_heads, dim, q_stride, num_slots, score_stride;
    float scale;
};

#if defined(__x86_64__) && defined(__GNUC__)
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

static long widest(void) {
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl"))
        return 16;
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? 8 : 0;
}
#else
static long widest(void) { return 0; }
static void linear_avx512(const float *x, long s, const float *w, const float *b, float *y, float *t, long n, long i,
                          long o, int add) {}
static void attend_float_avx512(const struct decode *in) {}
static void attend_bfloat16_avx512(const struct decode *in) {}
#define linear_avx2 linear_avx512
#define attend_float_avx2 attend_float_avx512
#define attend_bfloat16_avx2 attend_bfloat16_avx512
#endif

static PyObject *width(PyObject *self, PyObject *none) { return PyLong_FromLong(widest()); }

/* The arguments as integers; a pointer is one. */
static int integers(PyObject *const *args, Py_ssize_t given, long long *into, Py_ssize_t expected) {
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

/* linear(width, x, x_stride, weight, bias, y, scratch, rows, inputs, outputs, add) */
static PyObject *linear(PyObject *self, PyObject *const *args, Py_ssize_t given) {
    long long a[11];
    if (integers(args, given, a, 11)) return NULL;
    Py_BEGIN_ALLOW_THREADS;
    (a[0] == 16 ? linear_avx512 : linear_avx2)((float *)a[1], a[2], (float *)a[3], (float *)a[4], (float *)a[5],
                                               (float *)a[6], a[7], a[8], a[9], (int)a[10]);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

/* decode(width, half, q, q_stride, keys, values, num_slots, slots, counts, bias, sinks, out, scratch, score_stride,
   batch, heads, kv_heads, dim, scale) */
static PyObject *decode(PyObject *self, PyObject *const *args, Py_ssize_t given) {
    long long a[18];
    if (integers(args, given, a, 18)) return NULL;
    double scale = given > 18 ? PyFloat_AsDouble(args[18]) : 0;
    if (PyErr_Occurred()) return NULL;
    struct decode in = {
        .q = (float *)a[2], .q_stride = a[3], .keys = (void *)a[4], .values = (void *)a[5], .num_slots = a[6],
        .slots = (int64_t *)a[7], .counts = (int64_t *)a[8], .bias = (float *)a[9], .sinks = (float *)a[10],
        .out = (float *)a[11], .scratch = (float *)a[12], .score_stride = a[13], .batch = a[14], .heads = a[15],
        .kv_heads = a[16], .dim = a[17], .scale = (float)scale};
    Py_BEGIN_ALLOW_THREADS;
    if (a[0] == 16) (a[1] ? attend_bfloat16_avx512 : attend_float_avx512)(&in);
    else (a[1] ? attend_bfloat16_avx2 : attend_float_avx2)(&in);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {{"width", width, METH_NOARGS, NULL},
                                {"linear", (PyCFunction)(void (*)(void))linear, METH_FASTCALL, NULL},
                                {"decode", (PyCFunction)(void (*)(void))decode, METH_FASTCALL, NULL},
                                {NULL, NULL, 0, NULL}};
static PyModuleDef_Slot slots[] = {{0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_native", NULL, 0, methods, slots, NULL, NULL, NULL};
PyMODINIT_FUNC PyInit__native(void) { return PyModuleDef_Init(&module); }
