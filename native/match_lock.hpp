// A read-write lock that lets writers through.
//
// With std::shared_mutex two busy readers starve a writer for milliseconds. Here a waiting writer stops
// new readers, who hold the lock for a few events only; a free lock costs a reader one atomic operation
// each way.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>

namespace virta {

class Lock {
  public:
    bool try_read() {
        uint32_t seen = state_.load(std::memory_order_relaxed);
        while (!(seen & kClosed))
            if (state_.compare_exchange_weak(seen, seen + 1, std::memory_order_acquire)) return true;
        return false;
    }

    void read() {
        while (!try_read()) {
            std::unique_lock<std::mutex> guard(mutex_);
            changed_.wait(guard, [this] { return !(state_.load(std::memory_order_relaxed) & kClosed); });
        }
    }

    void end_read() {
        // The last reader before a waiting writer wakes it.
        if (state_.fetch_sub(1, std::memory_order_release) == (kClosed | 1)) wake();
    }

    bool try_write() {
        uint32_t idle = 0;
        return state_.compare_exchange_strong(idle, kClosed, std::memory_order_acquire);
    }

    void write() {
        std::unique_lock<std::mutex> guard(mutex_);
        while (state_.fetch_or(kClosed, std::memory_order_acquire) & kClosed)
            changed_.wait(guard, [this] { return !(state_.load(std::memory_order_relaxed) & kClosed); });
        changed_.wait(guard, [this] { return state_.load(std::memory_order_acquire) == kClosed; });
    }

    void end_write() {
        state_.fetch_and(~kClosed, std::memory_order_release);
        wake();
    }

  private:
    static constexpr uint32_t kClosed = 1u << 31;

    void wake() {
        { std::lock_guard<std::mutex> guard(mutex_); }
        changed_.notify_all();
    }

    std::atomic<uint32_t> state_{0};
    std::mutex mutex_;
    std::condition_variable changed_;
};

}  // namespace virta
