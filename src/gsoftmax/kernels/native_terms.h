/* z, its backward pass, softmax(z) and the loss of several labels: native.c includes this file twice, first for what
 * follows here, then for each instruction set.
 *
 * A thread takes a run of rows, GROUP rows at a time, and in them one tile of columns after the other, so that what is
 * known of a class stays in the first-level cache for the rows of a group.  An array that is not a float row in memory
 * is copied to and from scratch, a tile of the group at a time.
 */
#ifndef W

enum { LOGITS, BACKWARD, SOFTMAX, LABELS };
enum { PAIRED, INDEPENDENT, PRINTED, MSML };
enum { COLUMNS = 512 }; /* of a tile */

/* What native.py packs after a job.  The job's x, dx, Gaussians and weight are what they are for the loss of one label,
 * its prob_stride is that of `grad`, and its c counts outputs, of which the first half stands for absence where labels
 * have two. */
struct terms {
    struct job job;
    const float *grad;       /* of z (N, C, S), or of losses (N, L) that are not reduced; or null */
    void *out;               /* z in float, probabilities in x's dtype, or losses (N, L) in float; or null */
    const void *target;      /* (N, L) of `target_type` */
    const float *pos_weight; /* (L,) contiguous, or null */
    int64_t kind, form, target_type;
    int64_t out_stride[3], target_stride[3];
    double ignore;
};
_Static_assert(sizeof(struct terms) == (32 + 14) * 8, "native.py packs 14 more fields of eight bytes");

/* One of a call's arrays, from one of its columns on. */
struct array {
    char *at;
    const int64_t *stride;
    int64_t dtype;
    float *rows; /* (GROUP, COLUMNS) scratch rows, where it cannot be used in place; unused if it is missing */
};

static int64_t size_of(int64_t dtype) {
    return dtype == FLOAT32 ? 4 : dtype == INT64 ? 8 : dtype == UINT8 ? 1 : 2;
}

/* `take`s scratch memory if there is any to be taken, and counts it otherwise. */
static struct array array_of(const void *at, int64_t column, int64_t dtype, const int64_t *stride, char **scratch,
                             int64_t *bytes) {
    struct array a = {(char *)at, stride, dtype, NULL};
    if (!at) return a;
    a.at += column * stride[1] * size_of(dtype);
    if (dtype == FLOAT32 && stride[1] == 1) return a;
    if (*scratch) a.rows = (float *)take(scratch, GROUP * COLUMNS * 4);
    else *bytes += GROUP * COLUMNS * 4;
    return a;
}

/* Column c0 of row r of a group. */
static inline float *place(const struct job *j, const struct array *a, int64_t row, int64_t r, int64_t c0) {
    if (!a->at) return NULL;
    return a->rows ? a->rows + r * COLUMNS : (float *)a->at + row_at(j, a->stride, row + r) + c0;
}

/* Columns apart in memory: the rows of a group are neighbours there, so rows are the inner loop. */
static void collect(const struct job *j, const struct array *a, int64_t row, int64_t rows, int64_t c0, int n) {
    int64_t at[GROUP];
    for (int64_t r = 0; r < rows; r++) at[r] = row_at(j, a->stride, row + r) + c0 * a->stride[1];
    for (int k = 0; k < n; k++)
        for (int64_t r = 0; r < rows; r++)
            a->rows[r * COLUMNS + k] = load_one(a->at, at[r] + k * a->stride[1], a->dtype);
}

static void spread(const struct job *j, const struct array *a, const float *from, int64_t step, int64_t row,
                   int64_t rows, int64_t c0, int n) {
    int64_t at[GROUP];
    for (int64_t r = 0; r < rows; r++) at[r] = row_at(j, a->stride, row + r) + c0 * a->stride[1];
    for (int k = 0; k < n; k++)
        for (int64_t r = 0; r < rows; r++) store_one(a->at, at[r] + k * a->stride[1], a->dtype, from[r * step + k]);
}

/* The arrays of one thread. */
struct arrays {
    struct array x, x_pos, target, grad, out, dx, dx_pos;
};

static struct arrays arrays_of(const struct terms *t, char **scratch, int64_t *bytes) {
    const struct job *j = &t->job;
    const int64_t labels = t->kind == LABELS && t->form != MSML ? j->c / 2 : 0;
    const void *x_pos = labels ? j->x : NULL, *dx_pos = labels ? j->dx : NULL;
    /* Softmax has rows of its own for what cannot be written in place. */
    void *out = t->kind == SOFTMAX ? NULL : t->out;
    return (struct arrays){
        .x = array_of(j->x, 0, j->dtype, j->x_stride, scratch, bytes),
        .x_pos = array_of(x_pos, labels, j->dtype, j->x_stride, scratch, bytes),
        .target = array_of(t->target, 0, t->target_type, t->target_stride, scratch, bytes),
        .grad = array_of(t->grad, 0, FLOAT32, j->prob_stride, scratch, bytes),
        .out = array_of(out, 0, FLOAT32, t->out_stride, scratch, bytes),
        .dx = array_of(j->dx, 0, j->dtype, j->dx_stride, scratch, bytes),
        .dx_pos = array_of(dx_pos, labels, j->dtype, j->dx_stride, scratch, bytes),
    };
}

#if defined(__x86_64__)
#define COPIES(name) {name##_baseline, name##_avx2, name##_avx512}
#else
#define COPIES(name) {name##_baseline}
#endif
#define DECLARE(name) static void name(const struct plan *, struct run *, int64_t, int64_t)
DECLARE(elements_baseline);
DECLARE(softmax_baseline);
DECLARE(count_baseline);
#if defined(__x86_64__)
DECLARE(elements_avx2);
DECLARE(softmax_avx2);
DECLARE(count_avx2);
DECLARE(elements_avx512);
DECLARE(softmax_avx512);
DECLARE(count_avx512);
#endif

__attribute__((visibility("default"))) int64_t gsoftmax_terms(const struct terms *t) {
    static void (*const elements[])(const struct plan *, struct run *, int64_t, int64_t) = COPIES(elements);
    static void (*const softmax[])(const struct plan *, struct run *, int64_t, int64_t) = COPIES(softmax);
    static void (*const count[])(const struct plan *, struct run *, int64_t, int64_t) = COPIES(count);
    const struct job *j = &t->job;
    /* A vector of labels may begin at any output. */
    const int64_t cp = round_up(j->c, PAD) + PAD, rows = j->n * j->s, labels = t->form == MSML ? j->c : j->c / 2;
    const int soft = t->kind == SOFTMAX, direct = j->dtype == FLOAT32 && t->out_stride[1] == 1;
    struct plan p = {.job = j, .terms = t, .cp = cp, .rows = rows, .tiles = (j->c + COLUMNS - 1) / COLUMNS};
    int64_t known = 0, bad = 0;
    double divisor = 1;
    char *at;
    int64_t failed = prepare(&p, t->kind == LABELS ? 2 : 0, &at);
    if (failed) return failed;
    p.group = soft ? (1 << 15) / cp : GROUP;
    p.group = p.group < 1 ? 1 : p.group > GROUP ? GROUP : p.group;
    if (t->kind == LABELS) { /* factors of labels that are present, and absent */
        p.y0 = (float *)take(&at, cp * 4);
        p.y1 = (float *)take(&at, cp * 4);
        for (int64_t k = 0; k < cp; k++) {
            p.y1[k] = k < labels && j->weight ? j->weight[k] : 1;
            p.y0[k] = p.y1[k] * (k < labels && t->pos_weight ? t->pos_weight[k] : 1);
        }
    }
    for (int64_t r = 0; r < p.runs && !failed; r++) {
        struct run *run = &p.run[r];
        const int wide = j->dmu && rows * (r + 1) / p.runs - rows * r / p.runs > FLUSH;
        const int64_t sums = j->dmu ? round_up(2 * cp * 4, 64) : 0, q = soft && !direct ? p.group * cp * 4 : 0;
        int64_t bytes = sums * (wide ? 3 : 1) + round_up(q, 64) + (COLUMNS + PAD) * 4 + round_up(p.group * p.tiles * 4, 64);
        char *none = NULL;
        arrays_of(t, &none, &bytes);
        bytes += round_up(sizeof(struct arrays), 64);
        if (!(run->memory = at = aligned(bytes))) {
            failed = NO_MEMORY;
            break;
        }
        take_sums(run, &at, sums, wide);
        run->z = (float *)take(&at, (COLUMNS + PAD) * 4);
        run->top = (float *)take(&at, p.group * p.tiles * 4);
        if (q) run->q = (float *)take(&at, q);
        run->arrays = (struct arrays *)take(&at, sizeof(struct arrays));
        *run->arrays = arrays_of(t, &at, &bytes);
    }
    if (!failed && t->kind == LABELS) {
        p.rows_of = count[j->isa - 1];
        in_parallel(work, &p);
        for (int64_t r = 0; r < p.runs; r++) known += p.run[r].known, bad += p.run[r].bad;
        divisor = j->reduction == MEAN ? (double)known : j->reduction == BATCHMEAN ? (double)j->n : 1;
        p.factor = divisor ? j->scale / divisor : 0;
        if (bad) failed = BAD_TARGET;
    }
    if (!failed && rows) {
        double loss = 0;
        if (j->dx && j->dx != j->x) want_huge_pages(j, j->dx, j->dx_stride, j->dtype);
        if (t->out && t->kind != LABELS)
            want_huge_pages(j, t->out, t->out_stride, soft ? j->dtype : FLOAT32);
        p.rows_of = (soft ? softmax : elements)[j->isa - 1];
        in_parallel(work, &p);
        for (int64_t r = 0; r < p.runs; r++) loss += p.run[r].loss;
        if (j->loss) *j->loss = (float)(loss / divisor);
        if (j->dmu) in_parallel(add_up, &p);
    }
    for (int64_t r = 0; r < p.runs; r++) free(p.run[r].memory);
    free(p.run);
    return failed;
}

#else

static inline V FN(load_some)(const float *p, int n, float rest) {
    return n >= W ? FN(load)(p) : FN(load_first)(p, n, rest);
}

static inline void FN(store_some)(float *p, V a, int n) {
    if (n >= W) FN(store)(p, a);
    else FN(store_first)(p, a, n);
}

/* The tile's columns of an array, for all rows of the group. */
static void FN(fetch)(const struct job *j, const struct array *a, int64_t row, int64_t rows, int64_t c0, int n) {
    if (!a->rows) return;
    if (a->stride[1] != 1) {
        collect(j, a, row, rows, c0, n);
        return;
    }
    for (int64_t r = 0; r < rows; r++) {
        const char *from = a->at + (row_at(j, a->stride, row + r) + c0) * size_of(a->dtype);
        float *to = a->rows + r * COLUMNS;
        if (a->dtype == INT64)
            for (int k = 0; k < n; k++) to[k] = (float)((const int64_t *)from)[k];
        else if (a->dtype == UINT8)
            for (int k = 0; k < n; k++) to[k] = (float)((const uint8_t *)from)[k];
        else FN(widen)(from, a->dtype, to, n);
    }
}

/* And back, from rows that are `step` apart. */
static void FN(put)(const struct job *j, const struct array *a, const float *from, int64_t step, int64_t row,
                    int64_t rows, int64_t c0, int n) {
    if (a->stride[1] == 1 && a->dtype != FLOAT32)
        for (int64_t r = 0; r < rows; r++)
            FN(narrow)(from + r * step, a->dtype, a->at + (row_at(j, a->stride, row + r) + c0) * 2, n);
    else spread(j, a, from, step, row, rows, c0, n);
}

/* u, scaled and held as in native.c, and exp(-u^2 / 2). */
static inline V FN(bell)(V x, const float *mu, const float *to_w, V *w) {
    V square, m;
    *w = FN(standard)(x, FN(load)(mu), FN(load)(to_w));
    square = -(*w * *w), m = FN(round)(square);
    return FN(scale)(FN(power)(square - m), m, square);
}

/* z of n classes; returns its maximum.  `fill`: whole vectors, -inf beyond n. */
static inline __attribute__((always_inline)) float FN(add_term)(const float *x, const float *mu, const float *to_w,
                                                                float *z, int n, float lam, float half,
                                                                const int fill) {
    V top = FN(set)(-FLT_MAX), w;
    for (int k = 0; k < n; k += W) {
        const V a = FN(load_some)(x + k, n - k, -INFINITY), e = FN(bell)(a, mu + k, to_w + k, &w);
        const V v = a + (FN(phi)(w, e) * lam + half);
        if (fill) FN(store)(z + k, v);
        else FN(store_some)(z + k, v, n - k);
        top = FN(max)(v, top);
    }
    return FN(top)(top);
}

/* dx from the gradient of z; the sums for dmu and dsigma are added to where wanted. */
static void FN(backward)(const float *grad, const float *x, float *dx, const struct plan *p, int64_t c0, int n,
                         float *sum_e, float *sum_ew) {
    const float *mu = p->mu + c0, *to_w = p->to_w + c0, *slope = p->slope + c0;
    for (int k = 0; k < n; k += W) {
        V w;
        const V g = FN(load_some)(grad + k, n - k, 0.0f), a = FN(load_some)(x + k, n - k, 0.0f);
        const V r = g * FN(bell)(a, mu + k, to_w + k, &w);
        if (sum_e) {
            FN(store)(sum_e + k, FN(load)(sum_e + k) - r);
            FN(store)(sum_ew + k, FN(load)(sum_ew + k) - r * w);
        }
        if (dx) FN(store_some)(dx + k, r * FN(load)(slope + k) + g, n - k);
    }
}

/* -log s(a), -log s(-a), s(-a) and s(a), s the logistic function, with the relative accuracy of exp in both tails:
 * log(1 + e) is e times a polynomial fitted for its relative error, 1.7e-7. */
struct FN(logistic) {
    V cost, cost_not, s_not, s;
};

static inline __attribute__((always_inline)) struct FN(logistic) FN(logistic)(V a) {
    const V e = FN(exp)(-FN(abs)(a)), zero = FN(set)(0.0f), large = 1.0f / (e + 1.0f), small = e * large;
    V v = e * 0.005232693627476692f - 0.02950523979961872f;
    v = v * e + 0.07822596281766891f;
    v = v * e - 0.13663247227668762f;
    v = v * e + 0.19106008112430573f;
    v = v * e - 0.2484298199415207f;
    v = v * e + 0.3331909775733948f;
    v = v * e - 0.4999949336051941f;
    v = (v * e + 0.9999999403953552f) * e;
    return (struct FN(logistic)){
        FN(max)(zero, -a) + v, FN(max)(zero, a) + v, FN(by_sign)(a, large, small), FN(by_sign)(a, small, large)};
}

/* Labels of one row, n of them: pointers to their first column, null for what is missing. */
struct FN(labels) {
    const float *x, *x_pos, *target, *grad;
    float *dx, *dx_pos, *out;
};

/* The sum of the losses, or the losses themselves, and dx.  d: the factor of every gradient; 0 where none is wanted. */
static inline __attribute__((always_inline)) float FN(label_tile)(const struct plan *p, struct run *run,
                                                                  const struct FN(labels) at, int64_t c0, int n,
                                                                  const int form, const int gauss) {
    const struct job *j = p->job;
    const int two = form != MSML, need = j->dx || j->dmu;
    const int64_t pos = two ? j->c / 2 + c0 : c0; /* of c0 among the outputs; absence is c0 itself */
    const float *wanted = two ? at.x_pos : at.x, keep = (float)(1 - j->smoothing), even = (float)(j->smoothing / 2);
    const float lam = (float)j->lam, half = (float)(j->lam / 2), ignore = (float)p->terms->ignore;
    float *dx_pos = two ? at.dx_pos : at.dx, *sum_e = run->sum, *sum_ew = run->sum + p->cp;
    V total = FN(set)(0.0f);
    for (int k = 0; k < n; k += W) {
        const int m = n - k;
        const V t = FN(load_some)(at.target + k, m, ignore), known = t - ignore, y = t * keep + even;
        const V present = FN(unless_zero)(known, y * FN(load)(p->y0 + c0 + k));
        const V absent = FN(unless_zero)(known, (1.0f - y) * FN(load)(p->y1 + c0 + k));
        V z = FN(load_some)(wanted + k, m, 0.0f), z_neg = two ? FN(load_some)(at.x + k, m, 0.0f) : z;
        V w = z, e = z, w_neg = z, e_neg = z, cost, cost_b, da, db, d, d_neg;
        if (gauss) {
            e = FN(bell)(z, p->mu + pos + k, p->to_w + pos + k, &w);
            z = z + (FN(phi)(w, e) * lam + half);
        }
        if (gauss && two) {
            e_neg = FN(bell)(z_neg, p->mu + c0 + k, p->to_w + c0 + k, &w_neg);
            z_neg = z_neg + (FN(phi)(w_neg, e_neg) * lam + half);
        }
        {
            const struct FN(logistic) a = FN(logistic)(z - (form == PAIRED ? z_neg : FN(set)(0.0f)));
            cost = a.cost, cost_b = a.cost_not, da = a.s_not, db = a.s;
        }
        if (form == INDEPENDENT || form == PRINTED) {
            const struct FN(logistic) b = FN(logistic)(z_neg);
            cost_b = form == INDEPENDENT ? b.cost : b.cost_not, db = form == INDEPENDENT ? b.s_not : b.s;
        }
        /* 0 * inf is 0 here: a masked output costs nothing where its label says the same. */
        cost = FN(unless_zero)(present, present * cost) + FN(unless_zero)(absent, absent * cost_b);
        if (at.out) FN(store_some)(at.out + k, cost, m);
        total += cost;
        if (!need) continue;
        d = FN(set)((float)p->factor);
        if (at.grad) d = d * FN(load_some)(at.grad + k, m, 0.0f);
        /* To a and b, and from these to z. */
        da = FN(unless_zero)(known, -d * (present * da));
        db = FN(unless_zero)(known, -d * (absent * db));
        d = da, d_neg = db;
        if (form == PAIRED || form == MSML) d = da - db;
        if (form == PAIRED) d_neg = -d;
        if (form == PRINTED) d_neg = -db;
        if (gauss) {
            const V r = d * e, r_neg = d_neg * e_neg;
            if (run->sum) {
                FN(store)(sum_e + pos + k, FN(load)(sum_e + pos + k) - r);
                FN(store)(sum_ew + pos + k, FN(load)(sum_ew + pos + k) - r * w);
            }
            if (run->sum && two) {
                FN(store)(sum_e + c0 + k, FN(load)(sum_e + c0 + k) - r_neg);
                FN(store)(sum_ew + c0 + k, FN(load)(sum_ew + c0 + k) - r_neg * w_neg);
            }
            d = r * FN(load)(p->slope + pos + k) + d;
            d_neg = r_neg * FN(load)(p->slope + c0 + k) + d_neg;
        }
        if (dx_pos) FN(store_some)(dx_pos + k, d, m);
        if (dx_pos && two) FN(store_some)(at.dx + k, d_neg, m);
    }
    return FN(sum)(total);
}

/* One loop for each case, so that none of them asks inside. */
static float FN(label_tiles)(const struct plan *p, struct run *run, const struct FN(labels) at, int64_t c0, int n) {
    const int gauss = p->job->sigma && p->job->lam > 0;
    switch (p->terms->form * 2 + gauss) {
    case PAIRED * 2: return FN(label_tile)(p, run, at, c0, n, PAIRED, 0);
    case PAIRED * 2 + 1: return FN(label_tile)(p, run, at, c0, n, PAIRED, 1);
    case INDEPENDENT * 2: return FN(label_tile)(p, run, at, c0, n, INDEPENDENT, 0);
    case INDEPENDENT * 2 + 1: return FN(label_tile)(p, run, at, c0, n, INDEPENDENT, 1);
    case PRINTED * 2: return FN(label_tile)(p, run, at, c0, n, PRINTED, 0);
    case PRINTED * 2 + 1: return FN(label_tile)(p, run, at, c0, n, PRINTED, 1);
    case MSML * 2: return FN(label_tile)(p, run, at, c0, n, MSML, 0);
    default: return FN(label_tile)(p, run, at, c0, n, MSML, 1);
    }
}

/* Everything that needs one look at each element. */
static void FN(elements)(const struct plan *p, struct run *run, int64_t first, int64_t last) {
    const struct terms *t = p->terms;
    const struct job *j = p->job;
    const struct arrays *a = run->arrays;
    const int64_t columns = t->kind != LABELS || t->form == MSML ? j->c : j->c / 2;
    int64_t since = 0;
    for (int64_t row = first; row < last; row += p->group) {
        const int64_t rows = last - row < p->group ? last - row : p->group;
        for (int64_t c0 = 0; c0 < columns; c0 += COLUMNS) {
            const int n = (int)(columns - c0 < COLUMNS ? columns - c0 : COLUMNS);
            FN(fetch)(j, &a->x, row, rows, c0, n);
            FN(fetch)(j, &a->x_pos, row, rows, c0, n);
            FN(fetch)(j, &a->target, row, rows, c0, n);
            FN(fetch)(j, &a->grad, row, rows, c0, n);
            for (int64_t r = 0; r < rows; r++) {
                float *x = place(j, &a->x, row, r, c0), *out = place(j, &a->out, row, r, c0);
                float *dx = place(j, &a->dx, row, r, c0), *grad = place(j, &a->grad, row, r, c0);
                if (t->kind == LOGITS)
                    FN(add_term)(x, p->mu + c0, p->to_w + c0, out, n, (float)j->lam, (float)(j->lam / 2), 0);
                else if (t->kind == BACKWARD)
                    FN(backward)(grad, x, dx, p, c0, n, run->sum ? run->sum + c0 : NULL,
                                 run->sum ? run->sum + p->cp + c0 : NULL);
                else
                    run->loss += FN(label_tiles)(p, run,
                                                 (struct FN(labels)){x, place(j, &a->x_pos, row, r, c0),
                                                                     place(j, &a->target, row, r, c0), grad, dx,
                                                                     place(j, &a->dx_pos, row, r, c0), out},
                                                 c0, n);
            }
            if (a->out.rows) FN(put)(j, &a->out, a->out.rows, COLUMNS, row, rows, c0, n);
            if (a->dx.rows) FN(put)(j, &a->dx, a->dx.rows, COLUMNS, row, rows, c0, n);
            if (a->dx_pos.rows) FN(put)(j, &a->dx_pos, a->dx_pos.rows, COLUMNS, row, rows, c0, n);
        }
        flush(run, p->cp, rows, &since);
    }
}

/* How many labels are known, and how many of these are not between 0 and 1. */
static void FN(count)(const struct plan *p, struct run *run, int64_t first, int64_t last) {
    const struct terms *t = p->terms;
    const struct job *j = p->job;
    const struct array *a = &run->arrays->target;
    const int64_t columns = t->form == MSML ? j->c : j->c / 2;
    const float ignore = (float)t->ignore;
    const V zero = FN(set)(0.0f), one = FN(set)(1.0f);
    for (int64_t row = first; row < last; row += p->group) {
        const int64_t rows = last - row < p->group ? last - row : p->group;
        for (int64_t c0 = 0; c0 < columns; c0 += COLUMNS) {
            const int n = (int)(columns - c0 < COLUMNS ? columns - c0 : COLUMNS);
            FN(fetch)(j, a, row, rows, c0, n);
            for (int64_t r = 0; r < rows; r++) {
                const float *y = place(j, a, row, r, c0);
                V known = zero, bad = zero;
                for (int k = 0; k < n; k += W) {
                    const V v = FN(load_some)(y + k, n - k, ignore), here = FN(unless_zero)(v - ignore, one);
                    known += here;
                    bad += FN(unless_zero)(FN(max)(zero, FN(min)(one, v)) - v, here);
                }
                run->known += (int64_t)FN(sum)(known);
                run->bad += (int64_t)FN(sum)(bad);
            }
        }
    }
}

static void FN(softmax)(const struct plan *p, struct run *run, int64_t first, int64_t last) {
    const struct terms *t = p->terms;
    const struct job *j = p->job;
    const struct array *x = &run->arrays->x, out = {t->out, t->out_stride, j->dtype, NULL};
    const int64_t c = j->c, cp = p->cp;
    for (int64_t row = first; row < last; row += p->group) {
        const int64_t rows = last - row < p->group ? last - row : p->group;
        float *q[GROUP];
        double top[GROUP], sum[GROUP];
        for (int64_t r = 0; r < rows; r++) {
            q[r] = run->q ? run->q + r * cp : place(j, &out, row, r, 0);
            top[r] = -FLT_MAX, sum[r] = 0;
        }
        /* q = exp(z - m), m the maximum of a tile; the sum so far is about the highest maximum so far. */
        for (int64_t c0 = 0; c0 < c; c0 += COLUMNS) {
            const int n = (int)(c - c0 < COLUMNS ? c - c0 : COLUMNS);
            FN(fetch)(j, x, row, rows, c0, n);
            for (int64_t r = 0; r < rows; r++) {
                const float m = FN(add_term)(place(j, x, row, r, c0), p->mu + c0, p->to_w + c0, run->z, n,
                                             (float)j->lam, 0.0f, 1);
                const double new_top = m > top[r] ? m : top[r], keep = top[r] == new_top ? 1 : c0 ? exp(top[r] - new_top) : 0;
                const double share = m == new_top ? 1 : exp(m - new_top);
                run->top[r * p->tiles + c0 / COLUMNS] = m;
                sum[r] = sum[r] * keep + FN(exponentials)(run->z, q[r] + c0, n, m) * share;
                top[r] = new_top;
            }
        }
        for (int64_t c0 = 0; c0 < c; c0 += COLUMNS) {
            const int n = (int)(c - c0 < COLUMNS ? c - c0 : COLUMNS);
            for (int64_t r = 0; r < rows; r++) {
                const float m = run->top[r * p->tiles + c0 / COLUMNS];
                const float k = (float)((m == top[r] ? 1 : exp(m - top[r])) / sum[r]);
                float *at = q[r] + c0;
                for (int i = 0; i < n; i += W) FN(store_some)(at + i, FN(load_some)(at + i, n - i, 0.0f) * k, n - i);
            }
            if (run->q) FN(put)(j, &out, run->q + c0, cp, row, rows, c0, n);
        }
    }
}

#endif
