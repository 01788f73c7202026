// Threads that share the tasks of a kernel, for machines where other processes want the same cores.
//
// The caller takes tasks itself from the first moment and at the end waits only for tasks that somebody has begun: a
// helper that sleeps or is not scheduled costs nothing but its help. (An OpenMP region waits for every thread to arrive;
// with one busy core too many, that wait is a time slice, milliseconds for microseconds of work.) Helpers spin for
// SPIN_TURNS after a task, about the gap between two kernels of a layer, then sleep.
//
// One job at a time: a second caller meanwhile computes alone. After a fork the child has no helpers and computes alone.
#pragma once

#include <stdint.h>

#include <atomic>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

namespace pool {

constexpr int SPIN_TURNS = 2000;  // of a pause each: some 20 to 60 microseconds

inline void breathe() {
#if defined(__x86_64__) || defined(__i386__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

class Pool {
   public:
    // Never destroyed: helpers may still sleep in it while the process ends.
    static Pool& shared() {
        static Pool* one = new Pool;
        return *one;
    }

    // Call run_task(context, i) for each i in [0, num_tasks), by at most num_threads threads, in no particular order.
    void run(int64_t num_tasks, int num_threads, void (*run_task)(void*, int64_t), void* context) {
        std::unique_lock<std::mutex> turn(busy_, std::try_to_lock);
        if (num_threads < 2 || num_tasks < 2 || num_tasks >= MOST_TASKS || !turn.owns_lock()) {
            for (int64_t i = 0; i < num_tasks; i++) run_task(context, i);
            return;
        }
        int helpers = num_threads - 1;
        if (helpers > num_tasks - 1) helpers = (int)(num_tasks - 1);
        if (helpers > MOST_HELPERS) helpers = MOST_HELPERS;
        try {
            while (num_helpers_ < helpers) {
                std::thread(&Pool::help, this, num_helpers_).detach();
                num_helpers_++;
            }
        } catch (const std::system_error&) {
            // No more threads for this process: those there are will do, or the caller alone.
        }
        run_task_ = run_task;
        context_ = context;
        unfinished_.store((int32_t)num_tasks, std::memory_order_relaxed);
        ticket_.store(pack(helpers, num_tasks, 0), std::memory_order_seq_cst);
        if (sleepers_.load(std::memory_order_seq_cst)) {
            wakes_.fetch_add(1, std::memory_order_seq_cst);
            wakes_.notify_all();
        }
        int64_t task;
        while ((task = claim(-1)) >= 0) finish(task);
        for (int turn_count = 0; unfinished_.load(std::memory_order_acquire); turn_count++)
            if (turn_count < SPIN_TURNS)
                breathe();
            else
                std::this_thread::yield();
    }

   private:
    static constexpr int64_t MOST_TASKS = 1 << 24;
    static constexpr int MOST_HELPERS = (1 << 15) - 1;

    // A ticket says all about a job that a claim depends on: how many helpers may join, the tasks, those begun.
    static uint64_t pack(int helpers, int64_t tasks, int64_t begun) {
        return (uint64_t)helpers << 48 | (uint64_t)tasks << 24 | (uint64_t)begun;
    }
    static int helpers_of(uint64_t ticket) { return (int)(ticket >> 48); }
    static int64_t tasks_of(uint64_t ticket) { return (int64_t)(ticket >> 24 & (MOST_TASKS - 1)); }
    static int64_t begun_of(uint64_t ticket) { return (int64_t)(ticket & (MOST_TASKS - 1)); }
    static bool is_open(uint64_t ticket, int helper) {
        return begun_of(ticket) < tasks_of(ticket) && helper < helpers_of(ticket);
    }

    // The next task of the current job, -1: none. What is claimed keeps the job, so its fields, in place.
    int64_t claim(int helper) {
        uint64_t ticket = ticket_.load(std::memory_order_acquire);
        while (is_open(ticket, helper))
            if (ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel)) return begun_of(ticket);
        return -1;
    }

    void finish(int64_t task) {
        run_task_(context_, task);
        unfinished_.fetch_sub(1, std::memory_order_acq_rel);
    }

    void help(int helper) {
        for (;;) {
            for (int turn = 0; turn < SPIN_TURNS; turn++) {
                const int64_t task = claim(helper);
                if (task >= 0) {
                    finish(task);
                    turn = 0;
                } else {
                    breathe();
                }
            }
            const uint32_t wakes = wakes_.load(std::memory_order_seq_cst);
            sleepers_.fetch_add(1, std::memory_order_seq_cst);
            // A job published before we counted as a sleeper would not wake us: look once more.
            if (!is_open(ticket_.load(std::memory_order_seq_cst), helper)) wakes_.wait(wakes);
            sleepers_.fetch_sub(1, std::memory_order_seq_cst);
        }
    }

    std::mutex busy_;
    int num_helpers_ = 0;
    void (*run_task_)(void*, int64_t) = nullptr;
    void* context_ = nullptr;
    alignas(64) std::atomic<uint64_t> ticket_{0};
    alignas(64) std::atomic<int32_t> unfinished_{0};
    alignas(64) std::atomic<uint32_t> wakes_{0};
    std::atomic<int32_t> sleepers_{0};
};

// task(i) for each i in [0, num_tasks).
template <class F>
void each(int64_t num_tasks, int num_threads, F&& task) {
    Pool::shared().run(
        num_tasks, num_threads, [](void* context, int64_t i) { (*static_cast<F*>(context))(i); }, (void*)&task);
}

// range(begin, end) over [0, count) in `parts` pieces of nearly equal length.
template <class F>
void ranges(int64_t count, int64_t parts, int num_threads, F&& range) {
    if (parts > count) parts = count;
    each(parts, num_threads, [&](int64_t i) { range(count * i / parts, count * (i + 1) / parts); });
}

}  // namespace pool
