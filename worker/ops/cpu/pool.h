// Threads that share the parts of one job at a time.
//
// The caller takes part, and waits only for parts that others have taken: a thread that the machine
// does not run holds nothing up. Threads without work look for it for some microseconds (the next
// job of a step comes within one), then sleep, so that they leave a shared machine's cores alone.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
static inline void relax() { _mm_pause(); }
#else
static inline void relax() { std::this_thread::yield(); }
#endif

class Pool {
 public:
  using Part = void (*)(void* job, int first, int last);

  explicit Pool(int threads) {
    for (int i = 1; i < threads; i++) threads_.emplace_back([this] { serve(); });
  }

  ~Pool() {
    ending_.store(true);
    round_.fetch_add(1);
    round_.notify_all();
    for (auto& thread : threads_) thread.join();
  }

  int size() const { return (int)threads_.size() + 1; }

  // Call part(job, first, last) over 0..count-1, at most `grain` at a time; returns when all are done.
  template <class F> void run(int count, int grain, F&& part) {
    if (threads_.empty() || count <= grain) {
      if (count > 0) part(0, count);
      return;
    }
    using Job = std::remove_reference_t<F>;
    uint64_t epoch = ((next_.load(std::memory_order_relaxed) >> 32) + 1) << 32;
    // Nothing can be taken while the fields change: whoever sees a new one finds `next_` changed.
    next_.store(epoch | kNone, std::memory_order_relaxed);
    job_.store((void*)&part, std::memory_order_release);
    part_.store([](void* job, int first, int last) { (*(Job*)job)(first, last); },
                std::memory_order_release);
    count_.store(count, std::memory_order_release);
    grain_.store(grain, std::memory_order_release);
    done_.store(0, std::memory_order_relaxed);
    next_.store(epoch, std::memory_order_release);
    round_.fetch_add(1, std::memory_order_seq_cst);
    if (sleeping_.load(std::memory_order_seq_cst) > 0) round_.notify_all();
    take();
    for (int spins = 0; done_.load(std::memory_order_acquire) < count; spins++) {
      if (spins < kSpins) {
        relax();
        continue;
      }
      int seen = done_.load(std::memory_order_acquire);
      if (seen < count) done_.wait(seen, std::memory_order_acquire);
    }
  }

 private:
  static constexpr int kSpins = 400;  // some 10 to 20 microseconds
  static constexpr uint64_t kNone = 0x7fffffff;

  // Take parts of the job that is on, until none is left. The job's fields stay as they are while
  // one of its parts is not taken, so a part that was taken by its epoch is of the fields read.
  void take() {
    for (;;) {
      uint64_t next = next_.load(std::memory_order_acquire);
      Part part = part_.load(std::memory_order_acquire);
      void* job = job_.load(std::memory_order_acquire);
      int count = count_.load(std::memory_order_acquire);
      int grain = grain_.load(std::memory_order_acquire);
      int first = (int)(uint32_t)next;
      if (first >= count) return;
      int last = first + grain < count ? first + grain : count;
      if (!next_.compare_exchange_weak(next, (next & ~0xffffffffull) | (uint32_t)last,
                                       std::memory_order_acq_rel))
        continue;
      part(job, first, last);
      int taken = last - first;
      if (done_.fetch_add(taken, std::memory_order_acq_rel) + taken == count) done_.notify_all();
    }
  }

  void serve() {
    int seen = 0;
    while (!ending_.load()) {
      int spins = 0;
      while (round_.load(std::memory_order_acquire) == seen) {
        if (++spins < kSpins) {
          relax();
          continue;
        }
        sleeping_.fetch_add(1, std::memory_order_seq_cst);
        round_.wait(seen, std::memory_order_seq_cst);
        sleeping_.fetch_sub(1, std::memory_order_seq_cst);
      }
      seen = round_.load(std::memory_order_acquire);
      take();
    }
  }

  std::vector<std::thread> threads_;
  std::atomic<Part> part_{nullptr};
  std::atomic<void*> job_{nullptr};
  std::atomic<int> count_{0}, grain_{1};
  alignas(64) std::atomic<uint64_t> next_{0};  // epoch of the job, and the first part not taken
  alignas(64) std::atomic<int> done_{0};
  alignas(64) std::atomic<int> round_{0};
  std::atomic<int> sleeping_{0};
  std::atomic<bool> ending_{false};
};
