/* The pass over the elements of rows; `module.c` includes this once for float and once for double.
 *
 * For one element: l = log_prob - rollout_log_prob (train over rollout), lc its value clamped to +-SAFETY_BOUND,
 * e = exp(lc) - 1, d = w - 1 with w the applied weight. Working with e and d keeps the precision of small l.
 * Comparisons are those of the torch kernel (`kernel.py`), in REAL, with bounds rounded to REAL.
 *
 * The lanes are rows where rows are short, and parts of one row where they are long; every lane is computed alike, so
 * a weight does not depend on where its element lies.
 */

/* Where the elements of one step lie: lane k's is at first + k * stride, for k < live. */
struct NAME(step) {
  int64_t first, stride;
  int live;
};

/* Step `s` of the `width` rows from `start` on. */
static INLINE struct NAME(step) NAME(step_at)(int64_t start, int width, int64_t s, int64_t columns, int across) {
  if (across) return (struct NAME(step)){start * columns + s, columns, width};
  const int64_t left = columns - s * LANES;
  return (struct NAME(step)){start * columns + s * LANES, 1, left < LANES ? (int)left : LANES};
}

#define VALID(TYPE) \
  for (int k = 0; k < at.live; ++k) valid[k] = (BITS)0 - (((const TYPE *)mask)[at.first + k * at.stride] != 0)

/* Which lanes hold an element that counts. */
static INLINE M NAME(load_valid)(const void *mask, int kind, const struct NAME(step) at) {
  M valid = {0};
  if (kind == FLOATS && sizeof(REAL) == sizeof(float)) {
    return (M)(NAME(load)((const REAL *)mask + at.first, at.stride, at.live) != 0);
  }
  switch (kind) {
    case BYTES:
      if (at.live == LANES && at.stride == 1) {
        int8_t bytes __attribute__((vector_size(LANES)));
        memcpy(&bytes, (const uint8_t *)mask + at.first, sizeof bytes);
        return (M)__builtin_convertvector(bytes != 0, NAME(S));
      }
      VALID(uint8_t);
      break;
    case INTS: VALID(int32_t); break;
    case LONGS: VALID(int64_t); break;
    case FLOATS: VALID(float); break;
    case DOUBLES: VALID(double); break;
    default:
      for (int k = 0; k < LANES; ++k) valid[k] = (BITS)0 - (BITS)(k < at.live);
  }
  return valid;
}

#define KEPT_AS(TYPE)                                                             \
  for (int k = 0; k < at.live; ++k) {                                             \
    const int64_t i = at.first + k * at.stride;                                   \
    ((TYPE *)kept)[i] = keep[k] ? ((const TYPE *)mask)[i] : 0;                    \
  }

/* Mask times keep. */
static INLINE void NAME(store_kept)(const void *mask, int kind, const struct NAME(step) at, M keep, void *kept) {
  const int whole = at.live == LANES && at.stride == 1;
  if (kind == FLOATS && sizeof(REAL) == sizeof(float)) {
    const V x = NAME(load)((const REAL *)mask + at.first, at.stride, at.live);
    NAME(store)(NAME(where)(keep, x), (REAL *)kept + at.first, at.stride, at.live);
    return;
  }
  switch (kind) {
    case NO_MASK:
    case BYTES:
      if (whole) {
        uint8_t bytes __attribute__((vector_size(LANES))) = {0};
        if (kind == BYTES) memcpy(&bytes, (const uint8_t *)mask + at.first, sizeof bytes);
        else bytes += 1;
        bytes &= __builtin_convertvector(keep, NAME(narrow));
        memcpy((uint8_t *)kept + at.first, &bytes, sizeof bytes);
      } else if (kind == BYTES) {
        KEPT_AS(uint8_t);
      } else {
        for (int k = 0; k < at.live; ++k) ((uint8_t *)kept)[at.first + k * at.stride] = keep[k] != 0;
      }
      break;
    case INTS: KEPT_AS(int32_t); break;
    case LONGS: KEPT_AS(int64_t); break;
    case FLOATS: KEPT_AS(float); break;
    default: KEPT_AS(double);
  }
}

/* One step: the elements' weights `*w`, and what they add to the row's figures. Returns which may stay. */
static INLINE M NAME(elements)(const struct plan *plan, V p, V q, M valid, V *sum, V *extreme, V *w) {
  const V zero = {0}, far = NAME(all)(FAR_AWAY);
  const V l = NAME(where)(valid, p - q);
  sum[LOG_PROB] += NAME(where)(valid, p);
  sum[L] += l;
  sum[N] += NAME(ones)(valid);
  sum[ABS] += NAME(absolute)(l);
  extreme[0] = NAME(most)(NAME(pick)(valid, l, -far), extreme[0]);
  extreme[1] = NAME(least)(NAME(pick)(valid, l, far), extreme[1]);
  const V lc = NAME(bounded)(l, -SAFETY_BOUND, SAFETY_BOUND);
  const struct NAME(powers) e = NAME(exponentials)(lc);
  const V k2 = lc * lc * (REAL)0.5;
  sum[LC] += lc;
  sum[K2_SUM] += k2;
  sum[K3_SUM] += e.beyond;
  sum[E2] += e.expm1 * e.expm1;
  M stays = valid;
  if (plan->level == TOKEN) {
    const M high = (M)(lc > (REAL)plan->is_log_upper), low = (M)(lc < (REAL)plan->is_log_lower);
    sum[IS_HIGH] += NAME(ones)(valid & high);
    sum[IS_LOW] += NAME(ones)(valid & low);
    const M outside = plan->is_lower > 0 ? high | low : high;
    V d = e.expm1;
    *w = e.exp;
    if (plan->mode == MASK) {
      stays &= ~outside;
    } else if (plan->mode == ZERO) {
      *w = NAME(where)(~outside, *w);
      d = NAME(pick)(outside, zero - 1, d);
    } else {
      const int floor = plan->mode == CLIP && plan->is_lower > 0;
      *w = NAME(bounded)(*w, floor ? plan->is_lower : -FAR_AWAY, plan->is_upper);
      d = NAME(bounded)(d, floor ? plan->is_lower - 1 : -FAR_AWAY, plan->is_upper - 1);
    }
    extreme[2] = NAME(most)(NAME(pick)(valid, d, -far), extreme[2]);
    *w = NAME(where)(valid, *w);
    d = NAME(where)(valid, d);
    sum[D] += d;
    sum[D2] += d * d;
    sum[W] += *w;
    sum[W2] += *w * *w;
  }
  for (int s = 0; s < STATISTICS; ++s) {
    if (!plan->has_token[s]) continue;
    const V x = s == K1 ? lc : s == K2 ? k2 : e.beyond;
    const M below = (M)(x < (REAL)plan->token_lower[s]), above = (M)(x > (REAL)plan->token_upper[s]);
    const V inside = NAME(where)(valid, NAME(bounded)(x, plan->token_lower[s], plan->token_upper[s]));
    V *cut = sum + CUTS + 4 * s;
    cut[BELOW] += NAME(ones)(valid & below);
    cut[ABOVE] += NAME(ones)(valid & above);
    cut[IN] += inside;
    cut[IN2] += inside * inside;
    stays &= ~(below | above);
    if (s != K1) extreme[2 + s] = NAME(least)(NAME(pick)(valid, x, far), extreme[2 + s]);
  }
  if (plan->has_veto) sum[VETO_LOW] += NAME(ones)(valid & (M)(l < (REAL)plan->log_veto));
  return stays;
}

/* What follows for whole rows: their weight, their criteria's statistics, and which of them stay. */
static INLINE M NAME(whole_rows)(const struct plan *plan, V *row) {
  const V divisor = NAME(most)(row[N], NAME(all)(1));
  M stays = ~(M){0};
  if (plan->has_veto) stays &= ~(M)(row[VETO_LOW] > 0);
  if (plan->level == SEQUENCE || plan->level == GEOMETRIC) {
    const V x = row[IS_LOG_RATIO] = plan->level == GEOMETRIC ? row[L] / divisor : row[L];
    const M high = (M)(x > (REAL)plan->is_log_upper), low = (M)(x < (REAL)plan->is_log_lower);
    row[IS_ROW_HIGH] = NAME(ones)(high);
    row[IS_ROW_LOW] = NAME(ones)(low);
    V w = NAME(exponentials)(NAME(bounded)(x, -SAFETY_BOUND, SAFETY_BOUND)).exp;
    if (plan->mode == MASK) stays &= ~(plan->is_lower > 0 ? high | low : high);
    else if (plan->mode == ZERO) w = NAME(where)(~(high | low), w);
    else w = NAME(bounded)(w, plan->mode == CLIP ? plan->is_lower : 0, plan->is_upper);
    row[IS_ROW_WEIGHT] = w;
  }
  for (int c = 0; c < plan->row_criteria; ++c) {
    const int s = plan->row_statistic[c];
    V x;
    if (plan->row_aggregate[c] == SEQ_MAX) { /* k2 and k3 are convex: their maximum is at an extreme of l */
      const V high = NAME(bounded)(row[L_MAX], -SAFETY_BOUND, SAFETY_BOUND);
      const V low = NAME(bounded)(row[L_MIN], -SAFETY_BOUND, SAFETY_BOUND);
      if (s == K2) x = NAME(most)(high * high * (REAL)0.5, low * low * (REAL)0.5);
      else x = NAME(most)(NAME(exponentials)(high).beyond, NAME(exponentials)(low).beyond);
    } else {
      x = row[s == K1 ? LC : s == K2 ? K2_SUM : K3_SUM];
      if (plan->row_aggregate[c] == SEQ_MEAN) x /= divisor;
      if (s == K1) x = -x;
    }
    row[ROW_STATISTIC + c] = x;
    stays &= ~((M)(x > (REAL)plan->row_upper[c]) | (M)(x < (REAL)plan->row_lower[c]));
  }
  return stays;
}

/* Sums of so many steps are in REAL; they go into double before rounding builds up. */
enum { NAME(STEPS_IN_REAL) = 32 };

static INLINE void NAME(flush)(V *sum, double (*total)[LANES]) {
  for (int f = 0; f < SUMS; ++f) {
    for (int k = 0; k < LANES; ++k) total[f][k] += (double)sum[f][k];
    sum[f] = (V){0};
  }
}

/* A long row's lanes together, in the first. */
static INLINE void NAME(fold)(double (*total)[LANES], V *extreme) {
  for (int k = 1; k < LANES; ++k) {
    for (int f = 0; f < SUMS; ++f) total[f][0] += total[f][k];
    for (int i = 0; i < EXTREMES; ++i) {
      const int is_maximum = i == 0 || i == 2;
      const REAL x = extreme[i][k];
      if (is_maximum ? x > extreme[i][0] : x < extreme[i][0]) extreme[i][0] = x;
    }
  }
}

/* Rows of `columns` elements each, without gaps. Writes `weights` (may be NULL), `kept` (may be NULL: nothing rejects)
 * and the figures of row i to column i of `table`, whose rows are `table_stride` apart. `notes` is scratch memory, a
 * mask for each step of a row or group of rows: which elements stay if their row does. */
CLONES static void NAME(run_pass)(const struct plan *plan, const REAL *p, const REAL *q, const void *mask, int kind,
                                  REAL *weights, void *kept, REAL *table, int64_t table_stride, int64_t rows,
                                  int64_t columns, void *notes) {
  const int across = columns <= SHORT;
  const int64_t steps = across ? columns : (columns + LANES - 1) / LANES;
  const int by_row = plan->level == SEQUENCE || plan->level == GEOMETRIC;
  M *may_stay = notes;
  for (int64_t start = 0; start < rows; start += across ? LANES : 1) {
    const int width = !across ? 1 : rows - start < LANES ? (int)(rows - start) : LANES;
    const V far = NAME(all)(FAR_AWAY);
    V sum[SUMS] = {{0}}, row[FIGURES] = {{0}}, extreme[EXTREMES] = {-far, far, -far, far, far};
    double total[SUMS][LANES] = {{0}};
    for (int64_t s = 0; s < steps; ++s) {
      const struct NAME(step) at = NAME(step_at)(start, width, s, columns, across);
      V w = {0};
      may_stay[s] = NAME(elements)(plan, NAME(load)(p + at.first, at.stride, at.live),
                                   NAME(load)(q + at.first, at.stride, at.live), NAME(load_valid)(mask, kind, at), sum,
                                   extreme, &w);
      if (plan->level == TOKEN) NAME(store)(w, weights + at.first, at.stride, at.live);
      if ((s + 1) % NAME(STEPS_IN_REAL) == 0) NAME(flush)(sum, total);
    }
    NAME(flush)(sum, total);
    if (!across) NAME(fold)(total, extreme);
    for (int f = 0; f < SUMS; ++f)
      for (int k = 0; k < LANES; ++k) row[f][k] = (REAL)total[f][k];
    for (int i = 0; i < EXTREMES; ++i) row[L_MAX + i] = extreme[i];
    M row_stays = NAME(whole_rows)(plan, row);
    V row_weight = row[IS_ROW_WEIGHT], counted = {0};
    if (!across) {
      row_stays = row_stays[0] != 0 ? ~(M){0} : (M){0};
      row_weight = NAME(all)(row_weight[0]);
    }
    for (int64_t s = 0; s < steps && (kept != NULL || by_row); ++s) {
      const struct NAME(step) at = NAME(step_at)(start, width, s, columns, across);
      const M keep = may_stay[s] & row_stays;
      counted += NAME(ones)(keep);
      if (kept != NULL) NAME(store_kept)(mask, kind, at, keep, kept);
      if (by_row) {
        const V w = NAME(where)(NAME(load_valid)(mask, kind, at), row_weight);
        NAME(store)(w, weights + at.first, at.stride, at.live);
      }
    }
    row[KEPT] = counted;
    if (!across) row[KEPT][0] = (REAL)NAME(total)(counted);
    for (int f = 0; f < FIGURES; ++f) {
      if (plan->place[f] >= 0) NAME(store)(row[f], table + plan->place[f] * table_stride + start, 1, width);
    }
  }
}

#undef VALID
#undef KEPT_AS
