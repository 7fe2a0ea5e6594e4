// `./fsdp bench collectives` compares the threads backend with gloo (processes) and
// with plain memcpy in one run. For every collective and size the three take turns in
// several rounds. The medians are shown, and every result is checked.
//
// size   bytes of the larger buffer: all-gather's output, reduce-scatter's input
// algbw  size / time: what a user waits for
// memcpy every rank is a thread that copies `size` bytes, all at the same time. No
//        all-gather through memory can be faster
#include <signal.h>
#include <sys/wait.h>
#include <torch/torch.h>
#include <unistd.h>

#include <fsdp/fsdp.h>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <iostream>
#include <sstream>

namespace {

using Clock = std::chrono::steady_clock;

struct Case {
  std::string op;
  int64_t bytes = 0;
  int iterations = 1;
};

/// The buffers of one rank, and the collective on them.
class Runner {
 public:
  Runner(fsdp::ProcessGroup group, const Case& what)
      : group_(std::move(group)),
        op_(what.op),
        numel_(what.bytes / static_cast<int64_t>(sizeof(float)) / group_.size()),
        large_(torch::full({numel_ * group_.size()}, group_.rank() + 1.0f)),
        small_(torch::full({numel_}, group_.rank() + 1.0f)) {}

  void run() {
    if (op_ == "all_gather") {
      group_.all_gather(large_, small_);
    } else if (op_ == "reduce_scatter") {
      group_.reduce_scatter(small_, large_);
    } else if (op_ == "all_reduce") {
      group_.all_reduce(large_, fsdp::ReduceOp::Max);
    } else {
      group_.broadcast(large_, 0);
    }
  }

  /// Seconds per call on the slowest rank.
  double time(int iterations) {
    run();
    group_.barrier();
    const auto start = Clock::now();
    for (int i = 0; i < iterations; ++i) {
      run();
    }
    auto seconds = torch::full({1}, std::chrono::duration<double>(Clock::now() - start).count());
    group_.all_reduce(seconds, fsdp::ReduceOp::Max);
    check();
    return seconds.item<float>() / iterations;
  }

 private:
  void check() const {
    const int n = group_.size();
    bool right = true;
    if (op_ == "all_gather") {
      const auto rows = large_.view({n, numel_});
      right = torch::equal(rows, torch::arange(1.0f, n + 1.0f).view({n, 1}).expand_as(rows));
    } else if (op_ == "reduce_scatter") {
      right = (small_ == n * (n + 1) / 2.0f).all().item<bool>();
    } else {
      right = (large_ == (op_ == "all_reduce" ? n : 1.0f)).all().item<bool>();
    }
    TORCH_CHECK(right, op_, " over ", group_.backend_name(), " gave a wrong result");
  }

  const fsdp::ProcessGroup group_;
  const std::string op_;
  const int64_t numel_;
  torch::Tensor large_;
  torch::Tensor small_;
};

double time_threads(int ranks, const Case& what) {
  double seconds = 0;
  fsdp::run_ranks(ranks, [&](int rank) {
    const auto mine = Runner(fsdp::default_group(), what).time(what.iterations);
    if (rank == 0) {
      seconds = mine;
    }
  });
  return seconds;
}

double time_memcpy(int ranks, const Case& what) {
  double seconds = 0;
  fsdp::run_ranks(ranks, [&](int rank) {
    std::vector<char> from(what.bytes, 1);
    std::vector<char> to(what.bytes, 2);
    fsdp::default_group().barrier();
    const auto start = Clock::now();
    for (int i = 0; i < what.iterations; ++i) {
      std::memcpy(to.data(), from.data(), to.size());
      asm volatile("" : : "r"(to.data()) : "memory");
    }
    fsdp::default_group().barrier();
    if (rank == 0) {
      seconds = std::chrono::duration<double>(Clock::now() - start).count() / what.iterations;
    }
  });
  return seconds;
}

/// Ranks as processes that read cases from their standard input. Rank 0 answers with a time.
class GlooProcesses {
 public:
  explicit GlooProcesses(int ranks) : job_({.num_ranks = ranks}) {
    for (int rank = 0; rank < ranks; ++rank) {
      int to_child[2];
      int from_child[2];
      TORCH_CHECK(pipe(to_child) == 0 && pipe(from_child) == 0, "no pipe");
      const auto environment = job_.environment(rank);
      const pid_t pid = fork();
      TORCH_CHECK(pid >= 0, "no process");
      if (pid == 0) {
        for (const auto& [name, value] : environment) {
          setenv(name.c_str(), value.c_str(), 1);
        }
        setenv("FSDP_CHECK_COLLECTIVES", "none", 1); // our checks are not measured
        dup2(to_child[0], 0);
        dup2(from_child[1], 1);
        for (const int fd : {to_child[0], to_child[1], from_child[0], from_child[1]}) {
          close(fd);
        }
        for (FILE* file : commands_) {
          close(fileno(file)); // else an earlier child would not see the end of its input
        }
        execl("/proc/self/exe", "collectives_bench", "--gloo-worker", nullptr);
        _exit(127);
      }
      close(to_child[0]);
      close(from_child[1]);
      pids_.push_back(pid);
      commands_.push_back(fdopen(to_child[1], "w"));
      answers_.push_back(fdopen(from_child[0], "r"));
    }
  }

  ~GlooProcesses() {
    for (FILE* file : commands_) {
      fclose(file);
    }
    for (const auto pid : pids_) {
      waitpid(pid, nullptr, 0);
    }
    for (FILE* file : answers_) {
      fclose(file);
    }
  }

  double time(const Case& what) {
    for (FILE* file : commands_) {
      fprintf(file, "%s %ld %d\n", what.op.c_str(), what.bytes, what.iterations);
      fflush(file);
    }
    double seconds = 0;
    TORCH_CHECK(fscanf(answers_[0], "%lf", &seconds) == 1, "a gloo process failed");
    return seconds;
  }

  static int worker() {
    fsdp::init_process_group({.backend = "gloo"});
    Case what;
    while (std::cin >> what.op >> what.bytes >> what.iterations) {
      const auto seconds = Runner(fsdp::default_group(), what).time(what.iterations);
      if (fsdp::get_rank() == 0) {
        std::cout << seconds << std::endl;
      }
    }
    return 0;
  }

 private:
  fsdp::LaunchJob job_;
  std::vector<pid_t> pids_;
  std::vector<FILE*> commands_;
  std::vector<FILE*> answers_;
};

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

std::string size_text(int64_t bytes) {
  return bytes >= (1 << 20) ? std::to_string(bytes >> 20) + " MiB"
                            : std::to_string(bytes >> 10) + " KiB";
}

} // namespace

int main(int argc, char** argv) {
  CLI::App app("Bandwidth of the collectives: threads, gloo and memcpy in one run.");
  int ranks = 4;
  int rounds = 5;
  int64_t max_mib = 64;
  double min_over_gloo = 0;
  double min_of_memcpy = 0;
  bool json = false;
  bool gloo_worker = false;
  app.add_option("--ranks", ranks, "Ranks")->capture_default_str();
  app.add_option("--rounds", rounds, "Rounds, of which the median counts")->capture_default_str();
  app.add_option("--max-mib", max_mib, "Largest size in MiB")->capture_default_str();
  app.add_option(
      "--min-over-gloo", min_over_gloo,
      "Exit 1 if the largest all-gather is not that many times gloo's");
  app.add_option(
      "--min-of-memcpy", min_of_memcpy,
      "Exit 1 if the largest all-gather is below that share of memcpy's");
  app.add_flag("--json", json, "One JSON object per line");
  app.add_flag("--gloo-worker", gloo_worker)->group("");
  CLI11_PARSE(app, argc, argv);
  if (gloo_worker) {
    return GlooProcesses::worker();
  }

  GlooProcesses gloo(ranks); // forks, so before this process has threads
  if (!json) {
    printf("%d ranks; algbw in GB/s, median of %d interleaved rounds\n\n", ranks, rounds);
    printf(
        "%-15s %9s %9s %9s %9s %8s %8s\n", "collective", "size", "threads", "gloo", "memcpy",
        "x gloo", "/ memcpy");
  }
  bool good = true;
  for (const std::string op : {"all_gather", "reduce_scatter", "all_reduce", "broadcast"}) {
    for (int64_t bytes = 64 << 10; bytes <= max_mib << 20; bytes *= 4) {
      const auto fitting = static_cast<int>((256 << 20) / bytes / ranks);
      const Case what{op, bytes, std::clamp(fitting, 2, 200)};
      std::vector<double> threads, plain, gloos;
      for (int round = 0; round < rounds; ++round) {
        threads.push_back(time_threads(ranks, what));
        gloos.push_back(gloo.time(what));
        plain.push_back(time_memcpy(ranks, what));
      }
      const auto bandwidth = [&](const auto& times) { return bytes / median(times) / 1e9; };
      const double t = bandwidth(threads), g = bandwidth(gloos), m = bandwidth(plain);
      if (json) {
        std::cout << nlohmann::json{{"op", op},          {"bytes", bytes}, {"ranks", ranks},
                                    {"threads_gbps", t}, {"gloo_gbps", g}, {"memcpy_gbps", m}}
                  << std::endl;
      } else {
        printf(
            "%-15s %9s %9.2f %9.2f %9.2f %8.2f %8.2f\n", op.c_str(), size_text(bytes).c_str(), t, g,
            m, t / g, t / m);
        fflush(stdout);
      }
      if (op == "all_gather" && bytes * 4 > max_mib << 20) {
        good = t >= min_over_gloo * g && t >= min_of_memcpy * m;
      }
    }
  }
  return good ? 0 : 1;
}
