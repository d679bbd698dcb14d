/* The extension module `_native`: the correction's two passes for tensors in host memory.
 *
 * Both take addresses as integers; `native/__init__.py` owns the memory and has checked shapes and types. A plan and a
 * reduction come as bytes of the structures in `plan.h` and `reduce.h`.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "plan.h"

#if defined(__GNUC__)
#define INLINE inline __attribute__((always_inline))
#else
#define INLINE inline
#endif

/* One build for every x86-64 processor: the widest vectors that the one at hand has are chosen when it is loaded. */
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#if __GNUC__ >= 12
#define CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#endif
#else
#define CLONES
#endif

#define REAL float
#define BITS uint32_t
#define SIGNED int32_t
#define NAME(x) x##_float
#define MAGIC 12582912.0f /* 1.5 * 2^23: adding it rounds to an integer, which the lowest bits then hold */
#define EXPONENT_BIAS 127u
#define MANTISSA_BITS 23
#define LN2_HIGH 0.693359375f
#define LN2_LOW -2.12194440054690583e-4f
/* By pairs of terms, which are independent: one after the other, the sum would wait for itself. */
#define series_float(r, r2) \
  ((0.5f + r * (1 / 6.0f)) + r2 * ((1 / 24.0f + r * (1 / 120.0f)) + r2 * (1 / 720.0f + r * (1 / 5040.0f))))
#include "lanes.h"
#include "pass.h"
#undef REAL
#undef BITS
#undef SIGNED
#undef V
#undef M
#undef LANES
#undef NAME
#undef MAGIC
#undef EXPONENT_BIAS
#undef MANTISSA_BITS
#undef LN2_HIGH
#undef LN2_LOW

#define REAL double
#define BITS uint64_t
#define SIGNED int64_t
#define NAME(x) x##_double
#define MAGIC 6755399441055744.0 /* 1.5 * 2^52 */
#define EXPONENT_BIAS 1023u
#define MANTISSA_BITS 52
#define LN2_HIGH 6.93147180369123816490e-01
#define LN2_LOW 1.90821492927058770002e-10
#define series_double(r, r2) \
  ((0.5 + r * (1 / 6.0)) + r2 * \
  ((1 / 24.0 + r * (1 / 120.0)) + r2 * \
  ((1 / 720.0 + r * (1 / 5040.0)) + r2 * \
  ((1 / 40320.0 + r * (1 / 362880.0)) + r2 * \
  ((1 / 3628800.0 + r * (1 / 39916800.0)) + r2 * \
  ((1 / 479001600.0 + r * (1 / 6227020800.0)) + r2 * \
  (1 / 87178291200.0 + r * (1 / 1307674368000.0))))))))
#include "lanes.h"
#include "pass.h"
#include "reduce.h"

static int integers(PyObject *const *args, Py_ssize_t count, long long *out) {
  for (Py_ssize_t i = 0; i < count; ++i) {
    out[i] = PyLong_AsLongLong(args[i]);
    if (out[i] == -1 && PyErr_Occurred()) return 0;
  }
  return 1;
}

/* The structure that `bytes` holds, or NULL with an error set. */
static const void *structure(PyObject *bytes, size_t size, const char *name) {
  if (!PyBytes_Check(bytes) || (size_t)PyBytes_GET_SIZE(bytes) != size) {
    PyErr_Format(PyExc_ValueError, "%s: expected %zu bytes", name, size);
    return NULL;
  }
  return PyBytes_AS_STRING(bytes);
}

#define ADDRESS(i) ((void *)(intptr_t)given[i])

static PyObject *run(PyObject *self, PyObject *const *args, Py_ssize_t count) {
  long long given[11];
  (void)self;
  if (count != 12) return PyErr_Format(PyExc_TypeError, "run: expected 12 arguments, got %zd", count);
  const struct plan *plan = structure(args[0], sizeof *plan, "plan");
  if (plan == NULL || !integers(args + 1, 11, given)) return NULL;
  if (!given[1] || !given[2] || !given[7] || (given[4] && !given[3]) || (plan->level && !given[5]) ||
      (plan->can_reject && !given[6]))
    return PyErr_Format(PyExc_ValueError, "run: a tensor without memory");
  const int64_t rows = given[9], columns = given[10], lanes = VECTOR_BYTES / (given[0] ? sizeof(double) : sizeof(float));
  const int64_t steps = columns <= SHORT ? columns : (columns + lanes - 1) / lanes;
  void *notes = aligned_alloc(VECTOR_BYTES, (size_t)steps * VECTOR_BYTES);
  if (notes == NULL) return PyErr_NoMemory();
  Py_BEGIN_ALLOW_THREADS
  if (given[0])
    run_pass_double(plan, ADDRESS(1), ADDRESS(2), ADDRESS(3), (int)given[4], ADDRESS(5), ADDRESS(6), ADDRESS(7),
                    given[8], rows, columns, notes);
  else
    run_pass_float(plan, ADDRESS(1), ADDRESS(2), ADDRESS(3), (int)given[4], ADDRESS(5), ADDRESS(6), ADDRESS(7),
                   given[8], rows, columns, notes);
  Py_END_ALLOW_THREADS
  free(notes);
  Py_RETURN_NONE;
}

/* `count` numbers as a tuple of Python floats. */
static PyObject *floats(const double *x, int count) {
  PyObject *out = PyTuple_New(count);
  for (int i = 0; out != NULL && i < count; ++i) {
    PyObject *item = PyFloat_FromDouble(x[i]);
    if (item == NULL) Py_CLEAR(out);
    else PyTuple_SET_ITEM(out, i, item);
  }
  return out;
}

static PyObject *reduce(PyObject *self, PyObject *const *args, Py_ssize_t count) {
  long long given[3];
  double sums[MAX_REDUCED], minima[MAX_RANGED], maxima[MAX_RANGED];
  (void)self;
  if (count != 4) return PyErr_Format(PyExc_TypeError, "reduce: expected 4 arguments, got %zd", count);
  const struct reduction *r = structure(args[0], sizeof *r, "reduction");
  if (r == NULL || !integers(args + 1, 3, given)) return NULL;
  if (r->reduced > MAX_REDUCED || r->ranged > MAX_RANGED) {
    return PyErr_Format(PyExc_ValueError, "reduction: %d and %d figures are too many", r->reduced, r->ranged);
  }
  Py_BEGIN_ALLOW_THREADS
  run_reduction(r, ADDRESS(1), (int)given[0], given[2], sums, minima, maxima);
  Py_END_ALLOW_THREADS
  return Py_BuildValue("(NNN)", floats(sums, r->reduced), floats(minima, r->ranged), floats(maxima, r->ranged));
}

static PyMethodDef methods[] = {
    {"run", (PyCFunction)(void (*)(void))run, METH_FASTCALL,
     "run(plan, is_double, log_prob, rollout_log_prob, mask, kind, weights, kept, table, table_stride, rows, columns)"},
    {"reduce", (PyCFunction)(void (*)(void))reduce, METH_FASTCALL,
     "reduce(reduction, is_double, table, rows) -> (sums, minima, maxima)"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_native", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void) {
  PyObject *module = PyModule_Create(&definition);
  /* what it was built from: `sources.py` */
  if (module != NULL && PyModule_AddStringConstant(module, "SOURCES", SOURCES) < 0) Py_CLEAR(module);
  return module;
}
