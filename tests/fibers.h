// The threads of one GPU workgroup as fibers on a CPU thread, and places where they meet.
#pragma once
#include <ucontext.h>

#include <vector>

namespace fibers {

struct Fiber {
  ucontext_t context;
  std::vector<char> stack;
  bool done;
};

struct Meeting {
  int arrived = 0, generation = 0;
};

static ucontext_t scheduler;
static std::vector<Fiber> all;
static int current;
static void (*body)();

inline void yield() { swapcontext(&all[current].context, &scheduler); }

// Wait until `count` fibers are here.
inline void meet(Meeting& m, int count) {
  int generation = m.generation;
  if (++m.arrived == count) {
    m.arrived = 0;
    m.generation++;
  } else {
    while (m.generation == generation) yield();
  }
}

inline void enter() {
  body();
  all[current].done = true;
  swapcontext(&all[current].context, &scheduler);
}

// Run `entry` in `count` fibers, in turns, until all are through; it finds its number in `current`.
inline void run(int count, void (*entry)()) {
  body = entry;
  all.resize(count);
  for (Fiber& f : all) {
    f.done = false;
    f.stack.resize(1 << 16);
    getcontext(&f.context);
    f.context.uc_stack.ss_sp = f.stack.data();
    f.context.uc_stack.ss_size = f.stack.size();
    f.context.uc_link = nullptr;
    makecontext(&f.context, enter, 0);
  }
  for (int left = count; left > 0;) {
    left = 0;
    for (current = 0; current < count; current++) {
      if (all[current].done) continue;
      swapcontext(&scheduler, &all[current].context);
      left += !all[current].done;
    }
  }
}

}  // namespace fibers
