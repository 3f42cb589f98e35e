/* Cross entropy of z = x + lam * Phi((x - mu) / sigma): the loss and every gradient, read off x in one call.  z itself,
 * softmax(z) and the loss of several labels are in native_terms.h.
 *
 * Plain C on raw pointers: no Python and no torch headers, so it is built by any GCC or Clang and called with ctypes
 * (native.py packs `struct job`).  The file includes itself once for each instruction set (the part under `#ifdef W`);
 * native.py asks `gsoftmax_best_isa` once what the processor has and names the copy to run in every job.
 *
 * A thread takes a run of rows, a few rows at a time, and the classes in tiles that fit the first-level cache:
 *
 *   A  z, its maximum m over the tile, q = exp(z - m), the sum of q                          (x is read from memory)
 *   -  maximum M and log-sum-exp of the row from its tiles: the loss
 *   B  d = p - y with p = q exp(m - M) / sum, s = lam phi(u) / sigma,                        (all of it still cached)
 *      dx = d (1 + s), dmu -= d s, dsigma -= d s u
 *
 * q lives where dx will be, so nothing of x's size is held besides dx, and the reduction's factor is inside d, so that
 * nothing is left for the backward pass.  Rows that are strided or in half precision are copied to float rows on the
 * way in and out, a tile at a time.
 *
 * The result depends on the number of threads, never on their timing: rows are dealt by position, and the partial sums
 * are added in a fixed order.
 */
#ifndef W

#include <float.h>
#include <math.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__linux__)
#include <sys/mman.h>
#endif
#include <pthread.h>

#if !defined(__GNUC__)
#error "needs the vector types of GCC or Clang"
#endif
#if __SIZEOF_POINTER__ != 8 || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "written for 64-bit little-endian machines and tried on no others"
#endif

/* The checksum of the source when it was compiled, from setup.py: native.py refuses what another version made. */
#ifndef SOURCE
#define SOURCE 0
#endif
extern const uint32_t gsoftmax_source;
__attribute__((visibility("default"))) const uint32_t gsoftmax_source = SOURCE;

enum { FLOAT32, BFLOAT16, FLOAT16, INT64, UINT8 }; /* the last two for targets only */
enum { NONE, MEAN, SUM, BATCHMEAN };

/* What native.py packs, all fields of eight bytes; pointers it does not need are null. */
struct job {
    const void *x;                    /* (N, C, S) of `dtype`, by strides */
    void *dx;                         /* likewise, or null */
    const int64_t *label;             /* (N, S) contiguous, or null: then `prob` */
    const float *prob;                /* (N, C, S) by strides */
    const float *mu, *sigma, *weight; /* (C,) contiguous; weight may be null */
    const float *row_grad;            /* (N, S) contiguous factors of the rows' gradients, or null */
    float *loss;                      /* (N, S) for NONE, else one number; or null */
    float *dmu, *dsigma;              /* (C,), both or neither */
    int64_t dtype, n, c, s;
    int64_t x_stride[3], dx_stride[3], prob_stride[3];
    int64_t ignore_index, reduction, threads;
    void *team;                       /* GOMP_parallel of the OpenMP runtime that torch uses, or null */
    int64_t isa;                      /* 1 baseline, 2 AVX2, 3 AVX-512; never above gsoftmax_best_isa() */
    double lam, smoothing, scale;     /* scale multiplies every gradient */
};
_Static_assert(sizeof(struct job) == 32 * 8, "native.py packs 32 fields of eight bytes");

enum { OK, BAD_LABEL, BAD_SIGMA, NO_MEMORY, BAD_TARGET };

enum {
    TILE = 1024,     /* classes at a time: mu, 1/sigma, two sums, x and q of a tile are 24 KB */
    PAD = 16,        /* rows of scratch memory end on a whole vector */
    GROUP = 16,      /* most rows at a time */
    SHORT = 128,     /* classes in a short row */
    FLUSH = 64,      /* rows added in float before the sum goes to double */
    GRAIN = 1 << 14, /* elements below which another thread does not pay */
};

/* u = (x - mu) / sigma is scaled by UNIT, so that exp(-u^2 / 2) = 2^(-w^2) with w = UNIT u, and held to 14 standard
 * deviations, where Phi is 0 or 1 and phi 0 to the last bit: x = -inf becomes finite. */
#define UNIT 0.84932180028801904272 /* sqrt(log2(e) / 2) */
#define W_MAX ((float)(14 * UNIT))
#define LOG2_E 1.44269504088896341f
/* 2^f = 1 + P1 f + ... on [-1/2, 1/2] */
#define P1 0.6931469768700995f
#define P2 0.24022241111125245f
#define P3 0.055507345158506256f
#define P4 0.009671576442381119f
#define P5 0.0013264645329239388f
/* Phi(-|u|), see phi() */
#define B0 0.2756781280040741
#define B1 0.11767913638436342f
#define B2 0.04526777445705898f
#define B3 0.3258702785710141f
#define B4 -0.3192902580910845f
#define B5 0.4443729559436307f
#define B6 -0.11389988726498271f
static const double PHI_0 = 0.39894228040143267794; /* phi(0) = 1 / sqrt(2 pi) */

struct terms;

/* Shared by the threads of one call. */
struct plan {
    const struct job *job;
    const struct terms *terms;
    float *mu, *to_w, *slope; /* (Cp,): w = (x - mu) to_w and s = slope 2^(-w^2) */
    float *y0, *y1;        /* dense targets: y = y0 + prob * y1, weight and smoothing inside; null without any */
    double y0_sum;
    int64_t cp, rows, runs, group, tiles;
    double factor; /* of every row's gradient: scale and 1 / denominator */
    struct run *run;
    void (*rows_of)(const struct plan *, struct run *, int64_t, int64_t);
    atomic_long next;
};

/* One thread's share. */
struct run {
    float *sum;   /* (2, Cp): sums over rows of -d e and -d e w, e = 2^(-w^2) */
    double *wide; /* the same, of all rows before the current FLUSH; null when there are few rows */
    float *x, *q, *y; /* (group, Cp) scratch rows where the tensors cannot be used in place */
    float *w, *e;     /* (group, Cp): w and 2^(-w^2), or a tile of them where no gradient is wanted */
    float *z;         /* (GROUP, SHORT) or (TILE,) */
    float *top;           /* (group, tiles): maximum of each tile */
    void *memory;
    double loss;
    struct arrays *arrays; /* see native_terms.h, and how many labels are known, and wrong */
    int64_t known, bad;
};

static int64_t round_up(int64_t v, int64_t to) { return (v + to - 1) / to * to; }

union bits {
    float f;
    uint32_t u;
};

static float float_of_bf16(uint16_t h) { return (union bits){.u = (uint32_t)h << 16}.f; }

static uint16_t bf16_of_float(float f) { /* round to nearest even; a NaN stays one */
    const uint32_t u = (union bits){.f = f}.u;
    return (uint16_t)(f != f ? u >> 16 | 0x40 : (u + 0x7fff + (u >> 16 & 1)) >> 16);
}

static float float_of_half(uint16_t h) {
    /* Exponent and fraction moved into place, then scaled by 2^112: exact, subnormal numbers included. */
    const uint32_t sign = (uint32_t)(h & 0x8000) << 16, rest = (uint32_t)(h & 0x7fff) << 13;
    const union bits a = {.u = rest}, b = {.f = a.f * 0x1p112f};
    return (union bits){.u = sign | ((h & 0x7c00) == 0x7c00 ? rest | 0x7f800000 : b.u)}.f;
}

static uint16_t half_of_float(float f) {
    const uint32_t u = (union bits){.f = f}.u, sign = u >> 16 & 0x8000, a = u & 0x7fffffff;
    if (a > 0x7f800000) return (uint16_t)(sign | 0x7e00);  /* NaN */
    if (a >= 0x477ff000) return (uint16_t)(sign | 0x7c00); /* 65520 and above round to infinity */
    if (a < 0x38800000) /* below 2^-14: one half more leaves the subnormal number, rounded, in the low bits */
        return (uint16_t)(sign | ((union bits){.f = (union bits){.u = a}.f + 0.5f}.u - 0x3f000000));
    return (uint16_t)(sign | (((a + 0xfff + (a >> 13 & 1)) >> 13) - (112 << 10)));
}

static float load_one(const void *p, int64_t i, int64_t dtype) {
    if (dtype == FLOAT32) return ((const float *)p)[i];
    if (dtype == INT64) return (float)((const int64_t *)p)[i];
    if (dtype == UINT8) return (float)((const uint8_t *)p)[i];
    return dtype == BFLOAT16 ? float_of_bf16(((const uint16_t *)p)[i]) : float_of_half(((const uint16_t *)p)[i]);
}

static void store_one(void *p, int64_t i, int64_t dtype, float f) {
    if (dtype == FLOAT32)
        ((float *)p)[i] = f;
    else
        ((uint16_t *)p)[i] = dtype == BFLOAT16 ? bf16_of_float(f) : half_of_float(f);
}

/* Where row i = n * S + s begins. */
static int64_t row_at(const struct job *j, const int64_t *stride, int64_t i) {
    return j->s == 1 ? i * stride[0] : i / j->s * stride[0] + i % j->s * stride[2];
}

/* Rows of a group are neighbours in memory when the classes are strided, so rows are the inner loop. */
static void gather(const struct job *j, const void *from, const int64_t *stride, int64_t dtype, float *to, int64_t cp,
                   int64_t row, int64_t rows, int64_t c0, int64_t c1) {
    int64_t at[GROUP];
    for (int64_t r = 0; r < rows; r++) at[r] = row_at(j, stride, row + r);
    for (int64_t c = c0; c < c1; c++)
        for (int64_t r = 0; r < rows; r++) to[r * cp + c] = load_one(from, at[r] + c * stride[1], dtype);
}

static void scatter(const struct job *j, const float *from, int64_t cp, int64_t row, int64_t rows, int64_t c0,
                    int64_t c1) {
    int64_t at[GROUP];
    for (int64_t r = 0; r < rows; r++) at[r] = row_at(j, j->dx_stride, row + r);
    for (int64_t c = c0; c < c1; c++)
        for (int64_t r = 0; r < rows; r++)
            store_one(j->dx, at[r] + c * j->dx_stride[1], j->dtype, from[r * cp + c]);
}

/* ------------------------------------------------------------------------------------------------ threads and memory */

static void work(void *data) {
    struct plan *p = data;
    for (;;) {
        /* Each share is taken by whichever thread comes first, so a team smaller than asked for still does it all. */
        int64_t t = atomic_fetch_add(&p->next, 1);
        if (t >= p->runs) return;
        p->rows_of(p, &p->run[t], p->rows * t / p->runs, p->rows * (t + 1) / p->runs);
    }
}

static void add_up(void *data) {
    struct plan *p = data;
    const int64_t c = p->job->c;
    for (;;) {
        int64_t t = atomic_fetch_add(&p->next, 1);
        if (t >= p->runs) return;
        for (int64_t j = c * t / p->runs; j < c * (t + 1) / p->runs; j++) {
            double mu = 0, sigma = 0;
            for (int64_t r = 0; r < p->runs; r++) {
                mu += p->run[r].sum[j];
                sigma += p->run[r].sum[p->cp + j];
                if (p->run[r].wide) mu += p->run[r].wide[j], sigma += p->run[r].wide[p->cp + j];
            }
            p->job->dmu[j] = (float)(mu * p->slope[j]);
            p->job->dsigma[j] = (float)(sigma * p->slope[j] / UNIT);
        }
    }
}

struct start {
    void (*what)(void *);
    void *with;
};

static void *start_thread(void *data) {
    struct start *s = data;
    s->what(s->with);
    return NULL;
}

/* what(p) on every thread of the team.  torch's own OpenMP threads are used where its runtime can be found: a second
 * pool would have to be woken while the first is still spinning.  GOMP_parallel is GNU's, and the runtimes of Intel and
 * LLVM export it too, for programs built by GCC.  Where it is missing, threads are made here.  Those that run, 65 at
 * most or as many as can be made, take the shares of the others. */
static void in_parallel(void (*what)(void *), struct plan *p) {
    atomic_store(&p->next, 0);
    if (p->runs == 1) {
        what(p);
    } else if (p->job->team) {
        void (*team)(void (*)(void *), void *, unsigned, unsigned);
        memcpy(&team, &p->job->team, sizeof team);
        team(what, p, (unsigned)p->runs, 0);
    } else {
        pthread_t thread[64];
        struct start s = {what, p};
        int64_t made = 0;
        while (made < p->runs - 1 && made < 64 && !pthread_create(&thread[made], NULL, start_thread, &s)) made++;
        what(p);
        for (int64_t t = 0; t < made; t++) pthread_join(thread[t], NULL);
    }
}

/* Fresh memory costs a page fault for every 4 KB, more than the arithmetic; in huge pages it is 512 times fewer. */
static void want_huge_pages(const struct job *j, void *at, const int64_t *stride, int64_t dtype) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    const uintptr_t page = 2 << 20;
    uintptr_t first = (uintptr_t)at, last;
    int64_t extent = 1, size = dtype == FLOAT32 ? 4 : 2;
    extent += (j->n - 1) * stride[0] + (j->c - 1) * stride[1] + (j->s - 1) * stride[2];
    last = (first + (uintptr_t)(extent * size)) / page * page;
    first = (first + page - 1) / page * page;
    if (last > first + page) madvise((void *)first, last - first, MADV_HUGEPAGE);
#else
    (void)j, (void)at, (void)stride, (void)dtype;
#endif
}

static char *take(char **at, int64_t bytes) {
    char *here = *at;
    *at += round_up(bytes, 64);
    return here;
}

static void *aligned(int64_t bytes) {
    void *memory;
    return posix_memalign(&memory, 64, (size_t)bytes + 64) ? NULL : memory;
}

/* Threads for `rows` rows, and mu, 1/sigma and the slope of every class.  The memory, with room for `vectors` more of Cp
 * numbers, is p->run; `at` is where that room begins. */
static int64_t prepare(struct plan *p, int64_t vectors, char **at) {
    const struct job *j = p->job;
    const int64_t c = j->c, cp = p->cp;
    int64_t bytes, bad = 0;
    for (int64_t k = 0; j->sigma && k < c; k++) bad += !(j->sigma[k] > 0);
    if (bad) return BAD_SIGMA;
    p->runs = p->rows * cp / GRAIN;
    p->runs = p->runs < 1 ? 1 : p->runs > j->threads ? j->threads : p->runs;
    p->runs = p->runs > p->rows ? (p->rows ? p->rows : 1) : p->runs;
    bytes = (3 + vectors) * round_up(cp * 4, 64) + round_up(p->runs * (int64_t)sizeof(struct run), 64);
    if (!(*at = aligned(bytes))) return NO_MEMORY;
    p->run = memset(take(at, p->runs * (int64_t)sizeof(struct run)), 0, (size_t)p->runs * sizeof(struct run));
    p->mu = (float *)take(at, cp * 4);
    p->to_w = (float *)take(at, cp * 4);
    p->slope = (float *)take(at, cp * 4);
    for (int64_t k = 0; k < cp; k++) {
        /* Both finite, whatever sigma is: no 0 * inf at x = mu. */
        const int inside = j->sigma && k < c;
        const double inverse = inside ? 1.0 / j->sigma[k] : 1;
        p->mu[k] = inside ? j->mu[k] : 0;
        p->to_w[k] = (float)fmin(inverse * UNIT, FLT_MAX);
        p->slope[k] = (float)fmin(inverse * j->lam * PHI_0, FLT_MAX);
    }
    return OK;
}

/* A thread's sums for dmu and dsigma, `bytes` of them, at `at`. */
static void take_sums(struct run *run, char **at, int64_t bytes, int wide) {
    if (bytes) run->sum = memset(take(at, bytes), 0, (size_t)bytes);
    if (wide) run->wide = memset(take(at, 2 * bytes), 0, (size_t)(2 * bytes));
}

/* Sums in float go to double before they lose digits. */
static void flush(struct run *run, int64_t cp, int64_t rows, int64_t *since) {
    *since += rows;
    if (!run->wide || *since < FLUSH) return;
    for (int64_t k = 0; k < 2 * cp; k++) run->wide[k] += run->sum[k], run->sum[k] = 0;
    *since = 0;
}

#include "native_terms.h"

/* ------------------------------------------------------------------------------------- one copy per instruction set */

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>

/* Clang and GCC spell "these functions may use AVX-512" differently. */
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,fma,f16c")
#endif
#define W 16
#define FN(name) name##_avx512
#define AVX512
#include "native.c"
#undef AVX512
#undef FN
#undef W
#if defined(__clang__)
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif
#define W 8
#define FN(name) name##_avx2
#define AVX2
#include "native.c"
#undef AVX2
#undef FN
#undef W
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif

#define W 4
#define FN(name) name##_baseline
#include "native.c"
#undef FN
#undef W

/* --------------------------------------------------------------------------------------------------------- the call */

/* The widest instruction set that this machine can run: 1 baseline, 2 AVX2, 3 AVX-512.  These are the ones named in the
 * targets above; __builtin_cpu_supports looks at the operating system too, but knows f16c only in newer compilers. */
__attribute__((visibility("default"))) int64_t gsoftmax_best_isa(void) {
#if defined(__x86_64__)
    unsigned a, b, c = 0, d;
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return 1;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_F16C)) return 1;
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                   __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")
               ? 3
               : 2;
#else
    return 1;
#endif
}

/* The number of labels that count, or the sum of their weights. */
static int check_labels(const struct job *j, double *total) {
    const int64_t rows = j->n * j->s;
    int64_t count = 0, bad = 0;
    double sum = 0;
    for (int64_t i = 0; i < rows; i++) {
        const int64_t y = j->label[i];
        const int counts = y != j->ignore_index, inside = (uint64_t)y < (uint64_t)j->c;
        bad += counts && !inside;
        count += counts;
        if (j->weight && counts && inside) sum += j->weight[y];
    }
    *total = j->weight ? sum : (double)count;
    return bad ? BAD_LABEL : OK;
}

__attribute__((visibility("default"))) int64_t gsoftmax_cross_entropy(const struct job *j) {
    const int64_t c = j->c, rows = j->n * j->s, cp = round_up(c, PAD);
    const int grad = j->dx || j->dmu, dense = !j->label || j->smoothing > 0;
    struct plan p = {.job = j, .cp = cp, .rows = rows, .tiles = (c + TILE - 1) / TILE};
    int64_t bytes, failed;
    double total = (double)rows;
    char *at;

    if (j->label && check_labels(j, &total)) return BAD_LABEL;
    failed = prepare(&p, dense ? 2 : 0, &at);
    if (failed) return failed;
    p.factor = j->scale / (j->reduction == MEAN ? total : 1);
    /* Rows in work at once: x and q of all of them should stay in a second-level cache. */
    p.group = (1 << 15) / (cp ? cp : 1);
    p.group = p.group < 1 ? 1 : p.group > GROUP ? GROUP : p.group;
    p.rows_of = rows_baseline;
#if defined(__x86_64__)
    switch (j->isa) {
    case 2: p.rows_of = rows_avx2; break;
    case 3: p.rows_of = rows_avx512; break;
    }
#endif

    if (dense) {
        p.y0 = (float *)take(&at, cp * 4);
        p.y1 = (float *)take(&at, cp * 4);
        for (int64_t k = 0; k < cp; k++) {
            const double w = k >= c ? 0 : j->weight ? j->weight[k] : 1;
            p.y0[k] = (float)(w * j->smoothing / (double)c);
            p.y1[k] = (float)(w * (1 - j->smoothing));
            p.y0_sum += p.y0[k];
        }
    }

    /* Scratch memory of every thread, all of it before any of them starts. */
    for (int64_t t = 0; t < p.runs; t++) {
        struct run *run = &p.run[t];
        const int64_t mine = p.rows * (t + 1) / p.runs - p.rows * t / p.runs;
        const int wide = j->dmu && mine > FLUSH;
        const int x = j->dtype != FLOAT32 || (j->x_stride[1] != 1 && c > 1);
        const int q = grad && (!j->dx || j->dtype != FLOAT32 || (j->dx_stride[1] != 1 && c > 1));
        const int y = !j->label && j->prob_stride[1] != 1 && c > 1;
        const int64_t sums = j->dmu ? 2 * cp * 4 : 0, scratch = round_up(p.group * cp * 4, 64);
        bytes = round_up(sums, 64) * (wide ? 3 : 1) + scratch * (x + q + y + 2 * grad);
        bytes += GROUP * SHORT * 4 + 2 * TILE * 4 + round_up(p.group * p.tiles * 4, 64);
        if (!(run->memory = at = aligned(bytes))) {
            failed = NO_MEMORY;
            break;
        }
        take_sums(run, &at, sums, wide);
        if (x) run->x = (float *)take(&at, scratch);
        if (q) run->q = (float *)take(&at, scratch);
        if (y) run->y = (float *)take(&at, scratch);
        run->z = (float *)take(&at, GROUP * SHORT * 4);
        run->w = (float *)take(&at, grad ? scratch : TILE * 4);
        run->e = (float *)take(&at, grad ? scratch : TILE * 4);
        run->top = (float *)take(&at, p.group * p.tiles * 4);
    }

    if (!failed) {
        double loss = 0;
        if (j->dx && rows) want_huge_pages(j, j->dx, j->dx_stride, j->dtype);
        in_parallel(work, &p);
        for (int64_t t = 0; t < p.runs; t++) loss += p.run[t].loss;
        if (j->loss && j->reduction != NONE) *j->loss = (float)(j->reduction == MEAN ? loss / total : loss);
        if (j->dmu) in_parallel(add_up, &p);
    }
    for (int64_t t = 0; t < p.runs; t++) free(p.run[t].memory);
    free(p.run);
    return failed;
}

#else /* ------------------------------------------------------------------------------------- vectors of W floats */

#if defined(AVX512)

#define V FN(vector)
typedef __m512 V;
static inline V FN(set)(float a) { return _mm512_set1_ps(a); }
static inline V FN(load)(const float *p) { return _mm512_loadu_ps(p); }
static inline void FN(store)(float *p, V a) { _mm512_storeu_ps(p, a); }
static inline V FN(load_first)(const float *p, int n, float rest) {
    return _mm512_mask_loadu_ps(_mm512_set1_ps(rest), (__mmask16)((1u << n) - 1), p);
}
static inline void FN(store_first)(float *p, V a, int n) { _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1), a); }
static inline V FN(max)(V a, V b) { return _mm512_max_ps(a, b); } /* b where either is NaN; so is min */
static inline V FN(min)(V a, V b) { return _mm512_min_ps(a, b); }
static inline V FN(abs)(V a) { return _mm512_abs_ps(a); }
static inline V FN(sign_of)(V a, V sign) { /* a >= 0 with the sign of `sign` */
    return _mm512_or_ps(a, _mm512_and_ps(sign, _mm512_set1_ps(-0.0f)));
}
static inline V FN(by_sign)(V a, V below, V above) { /* `below` where a has a minus sign */
    return _mm512_mask_mov_ps(above, _mm512_movepi32_mask(_mm512_castps_si512(a)), below);
}
static inline V FN(unless_zero)(V test, V a) { /* a, or 0 where `test` is 0 */
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(test, _mm512_setzero_ps(), _CMP_NEQ_UQ), a);
}
static inline V FN(round)(V a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
/* a * 2^n where v >= -126 (or NaN), else 0: normal numbers only */
static inline V FN(scale)(V a, V n, V v) {
    return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(v, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ), a, n);
}
static inline float FN(sum)(V a) { return _mm512_reduce_add_ps(a); }
static inline float FN(top)(V a) { return _mm512_reduce_max_ps(a); }

#elif defined(AVX2)

#define V FN(vector)
typedef __m256 V;
static inline V FN(set)(float a) { return _mm256_set1_ps(a); }
static inline V FN(load)(const float *p) { return _mm256_loadu_ps(p); }
static inline void FN(store)(float *p, V a) { _mm256_storeu_ps(p, a); }
static inline __m256i FN(first)(int n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
static inline V FN(load_first)(const float *p, int n, float rest) {
    const __m256i mask = FN(first)(n);
    return _mm256_blendv_ps(_mm256_set1_ps(rest), _mm256_maskload_ps(p, mask), _mm256_castsi256_ps(mask));
}
static inline void FN(store_first)(float *p, V a, int n) { _mm256_maskstore_ps(p, FN(first)(n), a); }
static inline V FN(max)(V a, V b) { return _mm256_max_ps(a, b); }
static inline V FN(min)(V a, V b) { return _mm256_min_ps(a, b); }
static inline V FN(abs)(V a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
static inline V FN(sign_of)(V a, V sign) { return _mm256_or_ps(a, _mm256_and_ps(sign, _mm256_set1_ps(-0.0f))); }
static inline V FN(by_sign)(V a, V below, V above) { return _mm256_blendv_ps(above, below, a); }
static inline V FN(unless_zero)(V test, V a) {
    return _mm256_and_ps(_mm256_cmp_ps(test, _mm256_setzero_ps(), _CMP_NEQ_UQ), a);
}
static inline V FN(round)(V a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
static inline V FN(scale)(V a, V n, V v) {
    const __m256i power = _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23);
    const V scaled = _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(a), power));
    return _mm256_and_ps(_mm256_cmp_ps(v, _mm256_set1_ps(-126.0f), _CMP_NLT_UQ), scaled);
}
static inline float FN(sum)(V a) {
    __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    b = _mm_add_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
}
static inline float FN(top)(V a) {
    __m128 b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    b = _mm_max_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_max_ss(b, _mm_movehdup_ps(b)));
}

#else

#define V FN(vector)
typedef float V __attribute__((vector_size(16)));
typedef int32_t FN(ints) __attribute__((vector_size(16)));
typedef uint32_t FN(bits) __attribute__((vector_size(16))); /* wraps where lanes that are not wanted overflow */
static inline V FN(set)(float a) { return (V){a, a, a, a}; }
static inline V FN(load)(const float *p) {
    V a;
    memcpy(&a, p, sizeof a);
    return a;
}
static inline void FN(store)(float *p, V a) { memcpy(p, &a, sizeof a); }
static inline V FN(load_first)(const float *p, int n, float rest) {
    V a = FN(set)(rest);
    memcpy(&a, p, (size_t)n * 4);
    return a;
}
static inline void FN(store_first)(float *p, V a, int n) { memcpy(p, &a, (size_t)n * 4); }
static inline V FN(pick)(FN(bits) mask, V a, V b) { return (V)((mask & (FN(bits))a) | (~mask & (FN(bits))b)); }
static inline V FN(max)(V a, V b) { return FN(pick)((FN(bits))(a > b), a, b); }
static inline V FN(min)(V a, V b) { return FN(pick)((FN(bits))(a < b), a, b); }
static inline V FN(abs)(V a) { return (V)((FN(bits))a & 0x7fffffff); }
static inline V FN(sign_of)(V a, V sign) { return (V)((FN(bits))a | ((FN(bits))sign & 0x80000000)); }
static inline V FN(by_sign)(V a, V below, V above) { return FN(pick)((FN(bits))((FN(ints))a < 0), below, above); }
static inline V FN(unless_zero)(V test, V a) { return (V)((FN(bits))(test != 0.0f) & (FN(bits))a); }
/* Adding 1.5 * 2^23 leaves no bits for a fraction; |a| < 2^22. */
static inline V FN(round)(V a) { return (a + 12582912.0f) - 12582912.0f; }
static inline V FN(scale)(V a, V n, V v) {
    const FN(bits) power = (FN(bits))__builtin_convertvector(n, FN(ints)) << 23;
    return (V)(((FN(bits))a + power) & (FN(bits))~(v < -126.0f));
}
static inline float FN(sum)(V a) { return (a[0] + a[2]) + (a[1] + a[3]); }
static inline float FN(top)(V a) {
    const float b = a[0] > a[2] ? a[0] : a[2], c = a[1] > a[3] ? a[1] : a[3];
    return b > c ? b : c;
}

#endif

/* 2^f for |f| <= 1/2, good to 9e-8 (own minimax fit). */
static inline V FN(power)(V f) {
    V a = f * P5 + P4;
    a = a * f + P3;
    a = a * f + P2;
    a = a * f + P1;
    return a * f + 1.0f;
}

/* exp(v) for v <= 0, 0 below the smallest normal number; with a fused multiply-add the fraction is exact up to the last
 * bit of log2(e). */
static inline V FN(exp)(V v) {
    const V w = v * LOG2_E, n = FN(round)(w);
    return FN(scale)(FN(power)(v * LOG2_E - n), n, w);
}

/* Phi(u) - 1/2, where the lower tail is Phi(-|u|) = exp(-u^2 / 2) (b1 t + ... + b6 t^6), t = 1 / (1 + b0 |u|): the form
 * of Hastings, with coefficients fitted to an absolute error of 4e-9.  e is exp(-u^2 / 2), which phi needs too. */
static inline V FN(phi)(V w, V e) {
    const V t = 1.0f / (FN(abs)(w) * (float)(B0 / UNIT) + 1.0f);
    V a = t * B6 + B5;
    a = a * t + B4;
    a = a * t + B3;
    a = a * t + B2;
    a = a * t + B1;
    return FN(sign_of)(0.5f - a * (t * e), w);
}

static inline V FN(standard)(V x, V mu, V to_w) {
    return FN(max)(FN(set)(-W_MAX), FN(min)(FN(set)(W_MAX), (x - mu) * to_w));
}

/* w, e and z of n classes, whole vectors, z = -inf beyond n; returns the maximum.  z is x + lam (Phi - 1/2) here: the
 * half is the same for all classes and cancels. */
static float FN(adjust)(const float *restrict x, const float *restrict mu, const float *restrict to_w,
                        float *restrict w, float *restrict e, float *restrict z, int n, float lam) {
    V top = FN(set)(-FLT_MAX);
    for (int k = 0; k < n; k += W) {
        const V a = n - k >= W ? FN(load)(x + k) : FN(load_first)(x + k, n - k, -INFINITY);
        const V b = FN(standard)(a, FN(load)(mu + k), FN(load)(to_w + k)), square = -(b * b), m = FN(round)(square);
        const V d = FN(scale)(FN(power)(square - m), m, square), v = FN(phi)(b, d) * lam + a;
        FN(store)(w + k, b);
        FN(store)(e + k, d);
        FN(store)(z + k, v);
        top = FN(max)(v, top);
    }
    return FN(top)(top);
}

/* q = exp(z - m) into `q` (which may be z); returns its sum. */
static float FN(exponentials)(const float *z, float *q, int n, float m) {
    V sum = FN(set)(0.0f);
    int k = 0;
    for (; k + W <= n; k += W) {
        const V a = FN(exp)(FN(load)(z + k) - m);
        FN(store)(q + k, a);
        sum += a;
    }
    if (k < n) {
        const V a = FN(exp)(FN(load)(z + k) - m); /* exp(-inf) = 0 beyond n */
        FN(store_first)(q + k, a, n - k);
        sum += a;
    }
    return FN(sum)(sum);
}

static inline V FN(target)(const float *y, const float *y0, const float *y1, int k, int n) {
    const V v = FN(load)(y0 + k);
    if (!y) return v;
    return (n - k >= W ? FN(load)(y + k) : FN(load_first)(y + k, n - k, 0.0f)) * FN(load)(y1 + k) + v;
}

/* The sum of y (z - m), for targets on every class; adds up y in *total. */
static float FN(dot)(const float *restrict z, const float *y, const float *y0, const float *y1, int n, float m,
                     double *total) {
    V sum = FN(set)(0.0f), all = FN(set)(0.0f);
    int k = 0;
    for (; k + W <= n; k += W) {
        const V v = FN(target)(y, y0, y1, k, n);
        sum += v * (FN(load)(z + k) - m);
        all += v;
    }
    if (k < n) {
        const V v = FN(target)(y, y0, y1, k, n);
        sum += v * (FN(load_first)(z + k, n - k, m) - m); /* not 0 * -inf */
        all += v;
    }
    *total += FN(sum)(all);
    return FN(sum)(sum);
}

/* q becomes dx; the sums for dmu and dsigma are added to where wanted.  k is the factor from q to p, g from y to d. */
static inline __attribute__((always_inline)) void FN(gradient)(const float *restrict w, const float *restrict e,
                                                               float *restrict q, const struct plan *p, int64_t c0,
                                                               int n, float k, float g, const float *y,
                                                               float *restrict sum_e, float *restrict sum_ew,
                                                               const int dense, const int sums) {
    const float *slope = p->slope + c0;
    const float *y0 = dense ? p->y0 + c0 : NULL, *y1 = dense ? p->y1 + c0 : NULL;
    for (int j = 0; j < n; j += W) {
        const int whole = n - j >= W;
        V d = (whole ? FN(load)(q + j) : FN(load_first)(q + j, n - j, 0.0f)) * k, r;
        if (dense) d = d - FN(target)(y, y0, y1, j, n) * g;
        r = d * FN(load)(e + j);
        if (sums) {
            FN(store)(sum_e + j, FN(load)(sum_e + j) - r);
            FN(store)(sum_ew + j, FN(load)(sum_ew + j) - r * FN(load)(w + j));
        }
        d = r * FN(load)(slope + j) + d;
        if (whole) FN(store)(q + j, d);
        else FN(store_first)(q + j, d, n - j);
    }
}

/* One loop for each case, so that none of them asks inside. */
static void FN(gradients)(const float *w, const float *e, float *q, const struct plan *p, int64_t c0, int n, float k,
                          float g, const float *y, float *sum_e, float *sum_ew) {
    if (p->y0 && sum_e) FN(gradient)(w, e, q, p, c0, n, k, g, y, sum_e, sum_ew, 1, 1);
    else if (p->y0) FN(gradient)(w, e, q, p, c0, n, k, g, y, sum_e, sum_ew, 1, 0);
    else if (sum_e) FN(gradient)(w, e, q, p, c0, n, k, g, y, sum_e, sum_ew, 0, 1);
    else FN(gradient)(w, e, q, p, c0, n, k, g, y, sum_e, sum_ew, 0, 0);
}

/* Half precision to float and back, classes side by side; the last few one by one. */
static void FN(widen)(const void *from, int64_t dtype, float *to, int64_t n) {
    int64_t k = 0;
    const uint16_t *h = from;
#if defined(AVX512) || defined(AVX2)
    for (; k + 8 <= n; k += 8) {
        const __m128i a = _mm_loadu_si128((const __m128i *)(h + k));
        const __m256i high = _mm256_slli_epi32(_mm256_cvtepu16_epi32(a), 16);
        _mm256_storeu_ps(to + k, dtype == FLOAT16 ? _mm256_cvtph_ps(a) : _mm256_castsi256_ps(high));
    }
#endif
    if (dtype == BFLOAT16)
        for (; k < n; k++) to[k] = float_of_bf16(h[k]);
    else
        for (; k < n; k++) to[k] = float_of_half(h[k]);
}

static void FN(narrow)(const float *from, int64_t dtype, void *to, int64_t n) {
    int64_t k = 0;
    uint16_t *h = to;
#if defined(AVX512) || defined(AVX2)
    for (; k + 8 <= n; k += 8) {
        const __m256 a = _mm256_loadu_ps(from + k);
        __m128i b;
        if (dtype == FLOAT16) {
            b = _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT);
        } else {
            const __m256i bits = _mm256_castps_si256(a);
            const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
            const __m256i round = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
            const __m256i nan = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
            const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
            const __m256i c = _mm256_srli_epi32(_mm256_blendv_epi8(round, nan, is_nan), 16);
            b = _mm_packus_epi32(_mm256_castsi256_si128(c), _mm256_extracti128_si256(c, 1));
        }
        _mm_storeu_si128((__m128i *)(h + k), b);
    }
#endif
    if (dtype == BFLOAT16)
        for (; k < n; k++) h[k] = bf16_of_float(from[k]);
    else
        for (; k < n; k++) h[k] = half_of_float(from[k]);
}

/* Rows from first to last, one group after the other. */
static void FN(rows)(const struct plan *p, struct run *run, int64_t first, int64_t last) {
    const struct job *j = p->job;
    const int64_t c = j->c, cp = p->cp, size = j->dtype == FLOAT32 ? 4 : 2;
    const int grad = j->dx || j->dmu, dense = p->y0 != NULL;
    int64_t since = 0;

    for (int64_t row = first; row < last; row += p->group) {
        const int64_t rows = last - row < p->group ? last - row : p->group;
        const float *x[GROUP], *y[GROUP];
        float *q[GROUP];
        double top[GROUP], sum[GROUP], dot[GROUP], all[GROUP], hit[GROUP];
        int64_t label[GROUP];
        for (int64_t r = 0; r < rows; r++) {
            x[r] = run->x ? run->x + r * cp : (const float *)j->x + row_at(j, j->x_stride, row + r);
            q[r] = run->q ? run->q + r * cp : grad ? (float *)j->dx + row_at(j, j->dx_stride, row + r) : NULL;
            y[r] = run->y     ? run->y + r * cp
                   : !j->label ? j->prob + row_at(j, j->prob_stride, row + r)
                               : NULL;
            label[r] = j->label ? j->label[row + r] : -1;
            if (j->label && label[r] == j->ignore_index) label[r] = INT64_MIN;
            top[r] = -FLT_MAX, sum[r] = dot[r] = all[r] = hit[r] = 0;
        }

        /* A */
        for (int64_t t = 0; t < p->tiles; t++) {
            const int64_t c0 = t * TILE, c1 = c0 + TILE < c ? c0 + TILE : c;
            const int n = (int)(c1 - c0);
            if (run->x) {
                if (j->x_stride[1] == 1 && j->dtype != FLOAT32)
                    for (int64_t r = 0; r < rows; r++)
                        FN(widen)((const char *)j->x + (row_at(j, j->x_stride, row + r) + c0) * size, j->dtype,
                                  run->x + r * cp + c0, n);
                else
                    gather(j, j->x, j->x_stride, j->dtype, run->x, cp, row, rows, c0, c1);
            }
            if (run->y) gather(j, j->prob, j->prob_stride, FLOAT32, run->y, cp, row, rows, c0, c1);
            /* Short rows side by side: alone, each would wait for its own maximum before it could go on. */
            for (int64_t r0 = 0, next; r0 < rows; r0 = next) {
                next = n > SHORT ? r0 + 1 : rows;
                for (int64_t r = r0; r < next; r++) {
                    const int64_t at = grad ? r * cp + c0 : 0;
                    if (label[r] == INT64_MIN) continue;
                    run->top[r * p->tiles + t] =
                        FN(adjust)(x[r] + c0, p->mu + c0, p->to_w + c0, run->w + at, run->e + at,
                                   run->z + (r - r0) * SHORT, n, (float)j->lam);
                }
                for (int64_t r = r0; r < next; r++) {
                    float m, *z = run->z + (r - r0) * SHORT;
                    double new_top, keep, share;
                    if (label[r] == INT64_MIN) continue;
                    /* The sum so far is about the highest maximum so far. */
                    m = run->top[r * p->tiles + t];
                    new_top = m > top[r] ? m : top[r];
                    keep = top[r] == new_top ? 1 : t ? exp(top[r] - new_top) : 0;
                    share = m == new_top ? 1 : exp(m - new_top);
                    if (label[r] >= c0 && label[r] < c1) hit[r] = z[label[r] - c0];
                    if (dense) {
                        double part = 0, d = FN(dot)(z, y[r] ? y[r] + c0 : NULL, p->y0 + c0, p->y1 + c0, n, m, &part);
                        dot[r] += d + part * m;
                        all[r] += part;
                    }
                    sum[r] = sum[r] * keep + FN(exponentials)(z, grad ? q[r] + c0 : z, n, m) * share;
                    top[r] = new_top;
                }
            }
        }

        /* The loss, and the factors of the gradient: d = k q - g y, and -hit of it at the label. */
        for (int64_t r = 0; r < rows; r++) {
            double loss = 0, own = 0;
            if (label[r] != INT64_MIN) {
                const double log_sum = log(sum[r]);
                if (dense) loss = (all[r] * top[r] - dot[r]) + all[r] * log_sum;
                if (j->label) {
                    own = (1 - j->smoothing) * (j->weight ? j->weight[label[r]] : 1);
                    loss += own * ((top[r] - hit[r]) + log_sum);
                }
                own *= p->factor * (j->row_grad ? j->row_grad[row + r] : 1);
                all[r] *= p->factor * (j->row_grad ? j->row_grad[row + r] : 1);
            }
            if (j->loss && j->reduction == NONE) j->loss[row + r] = (float)loss;
            run->loss += loss;
            hit[r] = own;
        }
        if (!grad) continue;

        /* B */
        for (int64_t t = 0; t < p->tiles; t++) {
            const int64_t c0 = t * TILE, c1 = c0 + TILE < c ? c0 + TILE : c;
            const int n = (int)(c1 - c0);
            float *sum_e = run->sum ? run->sum + c0 : NULL, *sum_ew = run->sum ? run->sum + cp + c0 : NULL;
            for (int64_t r = 0; r < rows; r++) {
                const float m = run->top[r * p->tiles + t];
                const float g = (float)(p->factor * (j->row_grad ? j->row_grad[row + r] : 1));
                const float *w = run->w + r * cp, *e = run->e + r * cp;
                const int64_t at = label[r];
                const int here = at >= c0 && at < c1;
                float k, q_y = 0, e_y = 0, ew_y = 0;
                if (at == INT64_MIN) {
                    memset(q[r] + c0, 0, (size_t)n * 4);
                    continue;
                }
                k = (float)((hit[r] + all[r]) * (m == top[r] ? 1 : exp(m - top[r])) / sum[r]);
                /* The label's class is done again on its own: there d is p - 1, and p alone has been rounded. */
                if (here) q_y = q[r][at];
                if (here && sum_e) e_y = run->sum[at], ew_y = run->sum[cp + at];
                FN(gradients)(w + c0, e + c0, q[r] + c0, p, c0, n, k, g, y[r] ? y[r] + c0 : NULL, sum_e, sum_ew);
                if (here) {
                    const float d = q_y * k - (dense ? p->y0[at] * g : 0) - (float)hit[r];
                    q[r][at] = d + d * e[at] * p->slope[at];
                    if (sum_e) run->sum[at] = e_y - d * e[at], run->sum[cp + at] = ew_y - d * e[at] * w[at];
                }
            }
            if (run->q && j->dx) {
                if (j->dx_stride[1] == 1 && j->dtype != FLOAT32)
                    for (int64_t r = 0; r < rows; r++)
                        FN(narrow)(run->q + r * cp + c0, j->dtype,
                                   (char *)j->dx + (row_at(j, j->dx_stride, row + r) + c0) * size, n);
                else
                    scatter(j, run->q, cp, row, rows, c0, c1);
            }
        }
        flush(run, cp, rows, &since);
    }
}

#include "native_terms.h"

#undef V
#endif
