#include "launch/launch_env.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <fsdp/error.h>

#include <map>

#include "support/tensors.h"

namespace fsdp::detail {
namespace {

using Variables = std::map<std::string, std::string>;

LaunchEnv read(const Variables& variables) {
  return read_launch_env([&](const std::string& name) -> std::optional<std::string> {
    const auto found = variables.find(name);
    return found == variables.end() ? std::nullopt : std::optional(found->second);
  });
}

/// With the master filled in, as env:// needs it.
LaunchEnv read_with_master(const Variables& variables) {
  auto launch = read(variables);
  require_master(launch);
  return launch;
}

void expect_refused(const Variables& variables, const std::string& part) {
  EXPECT_TRUE(
      test::contains(test::message_of<ConfigError>([&] { read_with_master(variables); }), part));
}

TEST(LaunchEnv, EmptyMeansAlone) {
  const auto launch = read({});
  EXPECT_EQ(launch.rank, 0);
  EXPECT_EQ(launch.world_size, 1);
  EXPECT_TRUE(launch.one_machine());
}

TEST(LaunchEnv, UnderstandsTorchrun) {
  const auto launch = read(
      {{"RANK", "5"},
       {"WORLD_SIZE", "8"},
       {"LOCAL_RANK", "1"},
       {"LOCAL_WORLD_SIZE", "4"},
       {"MASTER_ADDR", "10.0.0.7"},
       {"MASTER_PORT", "4711"},
       {"TORCHELASTIC_USE_AGENT_STORE", "True"},
       {"TORCHELASTIC_RESTART_COUNT", "2"}});
  EXPECT_EQ(launch.rank, 5);
  EXPECT_EQ(launch.world_size, 8);
  EXPECT_EQ(launch.local_rank, 1);
  EXPECT_EQ(launch.master_addr, "10.0.0.7");
  EXPECT_EQ(launch.master_port, 4711);
  EXPECT_TRUE(launch.agent_store);
  EXPECT_EQ(launch.attempt, 2);
  EXPECT_FALSE(launch.one_machine());
}

TEST(LaunchEnv, TorchrunOnOneMachineNeedsNoLoopbackName) {
  const auto launch = read(
      {{"RANK", "1"},
       {"WORLD_SIZE", "2"},
       {"LOCAL_WORLD_SIZE", "2"},
       {"MASTER_ADDR", "some-host"},
       {"MASTER_PORT", "4711"}});
  EXPECT_TRUE(launch.one_machine());
}

TEST(LaunchEnv, UnderstandsSlurmOnSeveralMachines) {
  const Variables variables{
      {"SLURM_STEP_ID", "0"},         {"SLURM_JOB_ID", "991"},
      {"SLURM_PROCID", "9"},          {"SLURM_NTASKS", "64"},
      {"SLURM_STEP_NUM_TASKS", "16"}, {"SLURM_LOCALID", "1"},
      {"SLURM_NNODES", "2"},          {"SLURM_STEP_NODELIST", "gpu[07-08,11]"}};
  const auto launch = read(variables);
  EXPECT_EQ(launch.rank, 9);
  EXPECT_EQ(launch.world_size, 16); // the step's, not the job's
  EXPECT_EQ(launch.local_rank, 1);
  EXPECT_EQ(launch.local_world_size, 8);
  EXPECT_EQ(launch.master_addr, "gpu07");
  EXPECT_FALSE(launch.one_machine());
  // The same port on every rank, another one in another step.
  auto other = variables;
  other["SLURM_PROCID"] = "3";
  EXPECT_EQ(read(other).master_port, launch.master_port);
  other["SLURM_STEP_ID"] = "1";
  EXPECT_NE(read(other).master_port, launch.master_port);
}

TEST(LaunchEnv, UnderstandsSlurmOnOneMachine) {
  const auto launch = read_with_master(
      {{"SLURM_STEP_ID", "0"},
       {"SLURM_JOB_ID", "991"},
       {"SLURM_PROCID", "1"},
       {"SLURM_NTASKS", "4"},
       {"SLURM_NNODES", "1"},
       {"SLURM_STEP_NODELIST", "gpu07"}});
  EXPECT_EQ(launch.master_addr, "127.0.0.1");
  EXPECT_TRUE(launch.one_machine());
}

TEST(LaunchEnv, ASlurmBatchScriptWithoutSrunIsAlone) {
  EXPECT_EQ(
      read({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "4"}, {"SLURM_JOB_ID", "1"}}).world_size, 1);
}

TEST(LaunchEnv, UnderstandsOpenMpi) {
  const auto launch = read_with_master(
      {{"OMPI_COMM_WORLD_RANK", "1"},
       {"OMPI_COMM_WORLD_SIZE", "4"},
       {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
       {"OMPI_COMM_WORLD_LOCAL_SIZE", "4"},
       {"PMIX_NAMESPACE", "prterun-host-77@1"}});
  EXPECT_EQ(launch.rank, 1);
  EXPECT_EQ(launch.local_rank, 1);
  EXPECT_EQ(launch.master_addr, "127.0.0.1");
  EXPECT_GT(launch.master_port, 0);
}

TEST(LaunchEnv, UnderstandsPmi) {
  const auto launch = read_with_master(
      {{"PMI_RANK", "2"},
       {"PMI_SIZE", "4"},
       {"MPI_LOCALRANKID", "0"},
       {"MPI_LOCALNRANKS", "2"},
       {"MASTER_ADDR", "node1"}});
  EXPECT_EQ(launch.rank, 2);
  EXPECT_EQ(launch.master_addr, "node1");
  EXPECT_EQ(launch.master_port, 29500);
}

TEST(LaunchEnv, MasterVariablesWin) {
  const auto launch = read(
      {{"SLURM_STEP_ID", "0"},
       {"SLURM_PROCID", "0"},
       {"SLURM_NTASKS", "2"},
       {"SLURM_NODELIST", "a"},
       {"MASTER_ADDR", "b"},
       {"MASTER_PORT", "1234"}});
  EXPECT_EQ(launch.master_addr, "b");
  EXPECT_EQ(launch.master_port, 1234);
}

TEST(LaunchEnv, ErrorsNameTheVariable) {
  expect_refused({{"RANK", "1"}}, "WORLD_SIZE is missing; it comes with RANK");
  expect_refused({{"WORLD_SIZE", "2"}}, "RANK is missing");
  expect_refused({{"RANK", "x"}, {"WORLD_SIZE", "2"}}, "RANK is 'x'");
  expect_refused({{"RANK", "2"}, {"WORLD_SIZE", "2"}}, "rank 2 of 2");
  expect_refused(
      {{"RANK", "0"}, {"WORLD_SIZE", "4294967297"}}, "WORLD_SIZE is '4294967297', which");
  for (const auto* port : {"99999", "0", "-1"}) {
    expect_refused(
        {{"RANK", "0"}, {"WORLD_SIZE", "1"}, {"MASTER_PORT", port}},
        std::string("MASTER_PORT is '") + port + "', which is no port; use a free one");
  }
  expect_refused({{"RANK", "-1"}, {"WORLD_SIZE", "2"}}, "rank -1 of 2");
  expect_refused({{"RANK", "0"}, {"WORLD_SIZE", "2"}}, "set MASTER_ADDR");
  expect_refused(
      {{"RANK", "0"}, {"WORLD_SIZE", "4"}, {"LOCAL_WORLD_SIZE", "2"}, {"MASTER_ADDR", "127.0.0.1"}},
      "loopback address, but only 2 of the 4 ranks");
  expect_refused(
      {{"OMPI_COMM_WORLD_RANK", "0"}, {"OMPI_COMM_WORLD_SIZE", "4"}}, "Open MPI: 4 ranks");
}

TEST(LaunchEnv, OtherWaysToMeetNeedNoMaster) {
  EXPECT_EQ(read({{"OMPI_COMM_WORLD_RANK", "1"}, {"OMPI_COMM_WORLD_SIZE", "4"}}).rank, 1);
}

TEST(LaunchEnv, ANameIsNotLoopbackWhateverItResolvesTo) {
  // Debian maps a machine's own name to 127.0.1.1.
  const auto launch = read_with_master(
      {{"RANK", "0"},
       {"WORLD_SIZE", "4"},
       {"LOCAL_WORLD_SIZE", "2"},
       {"MASTER_ADDR", "ip6-localhost"}});
  EXPECT_FALSE(launch.one_machine());
}

TEST(LaunchEnv, FirstSlurmHost) {
  EXPECT_EQ(first_slurm_host("node1"), "node1");
  EXPECT_EQ(first_slurm_host("node1,node2"), "node1");
  EXPECT_EQ(first_slurm_host("node[1-4]"), "node1");
  EXPECT_EQ(first_slurm_host("node[007,9]"), "node007");
  EXPECT_EQ(first_slurm_host("rack1-n[3-4].cluster,other"), "rack1-n3.cluster");
  EXPECT_THROW(first_slurm_host("node[1"), ConfigError);
}

} // namespace
} // namespace fsdp::detail
