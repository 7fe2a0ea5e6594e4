// What the launcher's tests start: does what its first argument says.
#include <signal.h>
#include <torch/torch.h>
#include <unistd.h>

#include <fsdp/fsdp.h>

#include <cstdlib>
#include <fstream>
#include <iostream>

int main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "";
  const std::string rank = std::getenv("RANK");
  if (what == "echo") {
    for (int i = 2; i < argc; ++i) {
      std::cout << argv[i] << "\n";
    }
    std::cerr << "rank " << rank << " of " << std::getenv("WORLD_SIZE") << " has "
              << std::getenv("OMP_NUM_THREADS") << " threads" << std::endl;
    return 0;
  }
  if (what == "sleep") { // with a child that would outlive a careless launcher
    std::ofstream(std::string(argv[2]) + "/" + rank) << getpid();
    const auto child = fork();
    if (child == 0) {
      signal(SIGTERM, SIG_IGN);
      std::ofstream(std::string(argv[2]) + "/child" + rank) << getpid();
    }
    while (true) {
      sleep(1);
    }
  }
  fsdp::init_process_group({.backend = "gloo", .timeout = std::chrono::seconds(30)});
  const auto world = fsdp::default_group();
  world.barrier();
  if (what == "fail" && rank == argv[2]) {
    std::cerr << "this is why" << std::endl;
    std::_Exit(std::atoi(argv[3]));
  }
  if (what == "fail") {
    sleep(60);
  }
  auto sum = torch::full({1}, world.rank() + 1.0);
  world.all_reduce(sum);
  std::cout << "sum " << sum.item<float>() << std::endl;
  world.barrier();
  return 0;
}
