/* What Python tells of a correction plan. `native/__init__.py` packs it: the two must agree, member by member. */

#ifndef FLOWGRPO_RC_PLAN_H
#define FLOWGRPO_RC_PLAN_H

#include <stdint.h>

/* Size of the vectors that every operation works on: the widest there are where each processor gets a build of its own
 * (CLONES) or the compiler splits them well (clang), else those of the one build. */
#if defined(__clang__) || defined(__AVX512F__) || (defined(__x86_64__) && defined(__GLIBC__))
#define VECTOR_BYTES 64
#elif defined(__AVX2__)
#define VECTOR_BYTES 32
#else
#define VECTOR_BYTES 16
#endif

/* Rows up to this long lie across the lanes, one row a lane; a longer one fills the lanes alone. */
#define SHORT 64

/* Every log ratio is clamped to +-SAFETY_BOUND before it is exponentiated. */
#define SAFETY_BOUND 20.0
/* Beyond any log ratio: what a minimum or maximum starts from. */
#define FAR_AWAY 1e38

enum level { NO_WEIGHTS, TOKEN, SEQUENCE, GEOMETRIC };
enum mode { TRUNCATE, ZERO, CLIP, MASK };
enum aggregate { SEQ_SUM, SEQ_MEAN, SEQ_MAX };
enum statistic { K1, K2, K3, STATISTICS };
enum { ROW_CRITERIA = 8 };

/* How the mask's elements are stored. */
enum kind { NO_MASK, BYTES, INTS, LONGS, FLOATS, DOUBLES };

/* Figures of a row. Sums over its elements come first; CUTS + 4 * statistic is the first of a token criterion's four. */
enum figure {
  LOG_PROB, L, LC, K3_SUM, K2_SUM, D, N, ABS, E2, D2, W, W2, IS_HIGH, IS_LOW, VETO_LOW,
  CUTS,
  SUMS = CUTS + 4 * STATISTICS,
  L_MAX = SUMS, L_MIN, D_MAX, K2_MIN, K3_MIN,
  IS_LOG_RATIO, IS_ROW_HIGH, IS_ROW_LOW, IS_ROW_WEIGHT,
  KEPT,
  ROW_STATISTIC,
  FIGURES = ROW_STATISTIC + ROW_CRITERIA
};
enum { BELOW, ABOVE, IN, IN2 }; /* of the four; of `l` for k1, whose statistic is -l: Python swaps the first two */
enum { EXTREMES = IS_LOG_RATIO - L_MAX };

struct plan {
  double is_upper, is_lower;                            /* bounds of the weights; lower 0: none */
  double is_log_upper, is_log_lower;                    /* bounds that are counted against */
  double log_veto;
  double token_lower[STATISTICS], token_upper[STATISTICS];
  double row_lower[ROW_CRITERIA], row_upper[ROW_CRITERIA];
  int32_t level, mode, has_veto, can_reject;
  int32_t has_token[STATISTICS];
  int32_t row_criteria;
  int32_t row_aggregate[ROW_CRITERIA], row_statistic[ROW_CRITERIA];
  int32_t place[FIGURES];                               /* row of the table, or -1 */
};

#endif
