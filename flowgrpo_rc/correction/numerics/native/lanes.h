/* Arithmetic on LANES numbers of type REAL at once; `module.c` includes this once for float and once for double.
 *
 * `V` is such a vector and `M` a mask of the same shape, whose lanes are all ones or all zeros: compilers that have
 * vector types (gcc, clang) make the widest instructions of these that the processor has.
 */

#define LANES ((int)(VECTOR_BYTES / sizeof(REAL)))
typedef REAL NAME(V) __attribute__((vector_size(VECTOR_BYTES)));
typedef BITS NAME(M) __attribute__((vector_size(VECTOR_BYTES)));
typedef SIGNED NAME(S) __attribute__((vector_size(VECTOR_BYTES)));
typedef uint8_t NAME(narrow) __attribute__((vector_size(LANES)));
#define V NAME(V)
#define M NAME(M)

static INLINE V NAME(all)(double x) { return (V){0} + (REAL)x; }

/* x where the mask is set, and 0 (of any x, NaN as well) elsewhere. */
static INLINE V NAME(where)(M mask, V x) { return (V)(mask & (M)x); }

static INLINE V NAME(pick)(M mask, V x, V y) { return (V)((mask & (M)x) | (~mask & (M)y)); }

/* 1 where the mask is set. */
static INLINE V NAME(ones)(M mask) { return NAME(where)(mask, NAME(all)(1)); }

static INLINE V NAME(least)(V x, V y) { return NAME(pick)((M)(x < y), x, y); }
static INLINE V NAME(most)(V x, V y) { return NAME(pick)((M)(x > y), x, y); }

/* NaN stays NaN. */
static INLINE V NAME(bounded)(V x, double low, double high) {
  x = NAME(pick)((M)(x < (REAL)low), NAME(all)(low), x);
  return NAME(pick)((M)(x > (REAL)high), NAME(all)(high), x);
}

static INLINE V NAME(absolute)(V x) { return NAME(pick)((M)(x < 0), -x, x); }

static INLINE double NAME(total)(V x) {
  double sum = 0;
  for (int k = 0; k < LANES; ++k) sum += (double)x[k];
  return sum;
}

/* `live` numbers, `stride` apart; zeros in the other lanes. */
static INLINE V NAME(load)(const REAL *from, int64_t stride, int live) {
  V x = {0};
  if (live == LANES && stride == 1) memcpy(&x, from, sizeof x);
  else for (int k = 0; k < live; ++k) x[k] = from[k * stride];
  return x;
}

static INLINE void NAME(store)(V x, REAL *to, int64_t stride, int live) {
  if (live == LANES && stride == 1) memcpy(to, &x, sizeof x);
  else for (int k = 0; k < live; ++k) to[k * stride] = x[k];
}

/* exp(x), exp(x) - 1 and exp(x) - 1 - x, for |x| <= 2 SAFETY_BOUND; NaN gives NaN. */
struct NAME(powers) { V exp, expm1, beyond; };

/* x = n ln 2 + r with |r| <= ln 2 / 2 (Cody and Waite's two-part ln 2), and exp(r) - 1 - r = r^2 series(r) by Taylor,
 * so that the third, where n = 0, keeps its relative precision at the smallest x. */
static INLINE struct NAME(powers) NAME(exponentials)(V x) {
  V n = x * (REAL)1.4426950408889634 + MAGIC; /* its lowest bits are the nearest integer */
  const V two_to_n = (V)(((M)n + EXPONENT_BIAS) << MANTISSA_BITS);
  n -= MAGIC;
  V r = x - n * LN2_HIGH;
  r -= n * LN2_LOW;
  const V r2 = r * r, beyond = r2 * NAME(series)(r, r2);
  const V scaled = two_to_n * (r + beyond), expm1 = (two_to_n - 1) + scaled;
  return (struct NAME(powers)){two_to_n + scaled, expm1, NAME(pick)((M)(n == 0), beyond, expm1 - x)};
}
