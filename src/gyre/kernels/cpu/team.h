/* Team: the threads of one parallel region: a barrier and a counter of tasks. OpenMP's own barrier puts threads to
 * sleep at once when a process has more teams than processors, as torch's several callers make it; a step has dozens of
 * barriers, microseconds apart, so this one spins for a while first. */
#pragma once
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#if defined(__x86_64__) || defined(__i386__)
#define PAUSE() __builtin_ia32_pause()
#else
#define PAUSE() ((void)0)
#endif

#define SPINS 4000 /* about 50 microseconds; then others may have the processor */

typedef struct {
    _Alignas(64) _Atomic int64_t arrived;
    _Alignas(64) _Atomic int64_t generation;
    _Alignas(64) _Atomic int64_t next_task[2];
} Team;

static void meet(Team *team, int64_t threads) {
    if (threads == 1) return;
    int64_t generation = atomic_load_explicit(&team->generation, memory_order_acquire);
    if (atomic_fetch_add_explicit(&team->arrived, 1, memory_order_acq_rel) + 1 == threads) {
        atomic_store_explicit(&team->arrived, 0, memory_order_relaxed);
        atomic_store_explicit(&team->generation, generation + 1, memory_order_release);
        return;
    }
    for (int spins = 0; atomic_load_explicit(&team->generation, memory_order_acquire) == generation; spins++) {
        if (spins < SPINS) PAUSE();
        else sched_yield();
    }
}

/* The next `count` tasks of a stage. Stages alternate between two counters; whoever finishes one stage, before the next
 * barrier, clears the counter of the other. */
static int64_t take_tasks(Team *team, int stage, int64_t count) {
    return atomic_fetch_add_explicit(&team->next_task[stage], count, memory_order_relaxed);
}

static void clear_tasks(Team *team, int stage) {
    atomic_store_explicit(&team->next_task[stage], 0, memory_order_relaxed);
}
