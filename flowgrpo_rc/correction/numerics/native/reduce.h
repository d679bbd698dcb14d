/* From the table of per-row figures to sums, minima and maxima over rows, in double.
 *
 * What `reduction.py` does with numpy, figure for figure and in its order; rows without a valid element are left out.
 */

enum { MAX_LINEAR = 8, MAX_DERIVED = MAX_LINEAR + ROW_CRITERIA + 1, FREE = 3, MAX_REDUCED = 192, MAX_RANGED = 32 };

struct reduction {
  double is_lower, is_upper;
  double sign[MAX_LINEAR];
  double lower[MAX_DERIVED], upper[MAX_DERIVED]; /* of the derived figures but the first FREE */
  int32_t sums, linear, row_criteria, extremes;  /* how many */
  int32_t first[MAX_LINEAR], second[MAX_LINEAR]; /* sign * first + second, means over a row; second may be -1 */
  int32_t touched, touched_below[STATISTICS];    /* how many; places of "below", which "above" follows */
  int32_t n, l, veto, log_ratio, kept;           /* places in the table, -1 where absent */
  int32_t mode;
  int32_t reduced, ranged;                       /* how many */
};

/* The figures so far, each lane's apart, and where the next goes. */
struct totals {
  M counts;
  V sum[MAX_REDUCED], low[MAX_RANGED], high[MAX_RANGED];
  int next_sum, next_range;
};

static INLINE void add(struct totals *t, V x) { t->sum[t->next_sum++] += where_double(t->counts, x); }

static INLINE void add_if(struct totals *t, M x) { add(t, ones_double(x)); }

static INLINE void range(struct totals *t, V x) {
  const int i = t->next_range++;
  t->low[i] = pick_double(t->counts & (M)(x < t->low[i]), x, t->low[i]);
  t->high[i] = pick_double(t->counts & (M)(x > t->high[i]), x, t->high[i]);
}

/* Some rows of the table. */
struct part {
  const void *table;
  int is_double, live;
  int64_t rows, start;
};

static INLINE V figure(const struct part *part, int place) {
  const int64_t at = place * part->rows + part->start;
  if (part->is_double) return load_double((const double *)part->table + at, 1, part->live);
  float x __attribute__((vector_size(VECTOR_BYTES / 2))) = {0};
  const float *from = (const float *)part->table + at;
  if (part->live == LANES) memcpy(&x, from, sizeof x);
  else for (int k = 0; k < part->live; ++k) x[k] = from[k];
  return __builtin_convertvector(x, V);
}

/* `d` of each row, from its log ratio, and the nine figures that come with it. */
static INLINE V row_weights(const struct reduction *r, struct totals *t, const struct part *part, V n) {
  const V log_ratio = figure(part, r->log_ratio), high = figure(part, r->log_ratio + 1);
  const V low = figure(part, r->log_ratio + 2);
  const struct powers_double raw = exponentials_double(bounded_double(log_ratio, -SAFETY_BOUND, SAFETY_BOUND));
  V d = raw.expm1;
  if (r->mode == ZERO) d = pick_double((M)(high + low > 0), all_double(-1), d);
  else if (r->mode != MASK) d = bounded_double(d, (r->mode == CLIP ? r->is_lower : 0) - 1, r->is_upper - 1);
  const V w = d + 1;
  add(t, high), add(t, low), add(t, high * n), add(t, low * n), add(t, high), add(t, low);
  add(t, raw.exp * n), add(t, w * n), add(t, w * n * w);
  return d;
}

/* What is summed of each derived figure: itself, its square, whether below, above or outside its bounds; of those of
 * whole rows also, times the row's elements, itself, outside, and itself clamped to the bounds and squared. */
static INLINE void add_powers(const struct reduction *r, struct totals *t, const V *x, int count, V n) {
#define BELOW_IT (M)(x[f] < r->lower[f - FREE])
#define ABOVE_IT (M)(x[f] > r->upper[f - FREE])
#define INSIDE bounded_double(x[f], r->lower[f - FREE], r->upper[f - FREE])
  const int linear = r->linear;
  for (int f = 0; f < count; ++f) add(t, x[f]);
  for (int f = FREE; f < count; ++f) add(t, x[f] * x[f]);
  for (int f = FREE; f < count; ++f) add_if(t, BELOW_IT);
  for (int f = FREE; f < count; ++f) add_if(t, ABOVE_IT);
  for (int f = FREE; f < count; ++f) add_if(t, BELOW_IT | ABOVE_IT);
  for (int f = linear; f < count; ++f) add(t, x[f] * n);
  for (int f = linear; f < count; ++f) add(t, where_double(BELOW_IT | ABOVE_IT, n));
  for (int f = linear; f < count; ++f) add(t, INSIDE * n);
  for (int f = linear; f < count; ++f) add(t, INSIDE * n * INSIDE);
#undef INSIDE
#undef ABOVE_IT
#undef BELOW_IT
}

static INLINE void add_rows(const struct reduction *r, struct totals *t, const struct part *part) {
  const V n = figure(part, r->n), divisor = most_double(n, all_double(1));
  V x[MAX_DERIVED];
  int count = 0;
  t->next_sum = t->next_range = 0;
  t->counts = (M)(n > 0); /* lanes without a row hold zeros */
  for (int f = 0; f < r->sums; ++f) add(t, figure(part, f));
  add_if(t, t->counts), add_if(t, t->counts);
  for (; count < r->linear; ++count) {
    x[count] = r->sign[count] * (figure(part, r->first[count]) / divisor);
    if (r->second[count] >= 0) x[count] += figure(part, r->second[count]) / divisor;
  }
  for (int f = 0; f < FREE; ++f) add(t, exponentials_double(bounded_double(x[f], -SAFETY_BOUND, SAFETY_BOUND)).exp);
  add(t, absolute_double(x[2]));
  add(t, exponentials_double(2 * bounded_double(figure(part, r->l), -SAFETY_BOUND, SAFETY_BOUND)).expm1);
  for (int c = 0; c < r->touched; ++c) {
    add_if(t, (M)(figure(part, r->touched_below[c]) + figure(part, r->touched_below[c] + 1) > 0));
  }
  for (int c = 0; c < r->row_criteria; ++c) x[count++] = figure(part, r->sums + c);
  if (r->log_ratio >= 0) x[count++] = row_weights(r, t, part, n);
  if (r->kept >= 0) {
    const V kept = figure(part, r->kept);
    add(t, kept), add_if(t, (M)(kept < n));
  }
  if (r->veto >= 0) add_if(t, (M)(figure(part, r->veto) > 0));
  add_powers(r, t, x, count, n);
  for (int f = 0; f < count; ++f) range(t, x[f]);
  for (int f = 0; f < r->extremes; ++f) range(t, figure(part, r->sums + r->row_criteria + f));
  if (r->log_ratio >= 0) range(t, figure(part, r->log_ratio));
}

/* Reads `table`, `rows` columns wide and without gaps. */
CLONES static void run_reduction(const struct reduction *r, const void *table, int is_double, int64_t rows,
                                 double *sums, double *minima, double *maxima) {
  struct totals t;
  for (int i = 0; i < r->reduced; ++i) t.sum[i] = all_double(0);
  for (int i = 0; i < r->ranged; ++i) t.low[i] = all_double(INFINITY), t.high[i] = all_double(-INFINITY);
  struct part part = {table, is_double, LANES, rows, 0};
  for (; part.start < rows; part.start += LANES) {
    part.live = rows - part.start < LANES ? (int)(rows - part.start) : LANES;
    add_rows(r, &t, &part);
  }
  for (int i = 0; i < r->reduced; ++i) sums[i] = total_double(t.sum[i]);
  for (int i = 0; i < r->ranged; ++i) {
    minima[i] = t.low[i][0], maxima[i] = t.high[i][0];
    for (int k = 1; k < LANES; ++k) {
      minima[i] = t.low[i][k] < minima[i] ? t.low[i][k] : minima[i];
      maxima[i] = t.high[i][k] > maxima[i] ? t.high[i][k] : maxima[i];
    }
  }
}
