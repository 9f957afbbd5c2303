// Commands of a device in order: launches and copies are recorded, submitted in batches, waited for when the
// host needs what they give.
#ifndef KVQ_VULKAN_STREAM_H_
#define KVQ_VULKAN_STREAM_H_

#include <array>
#include <memory>
#include <vector>

#include "device.h"

namespace kvq {

// An argument of a launch: where a buffer starts, and whether the kernel writes it.
struct Binding {
  Place place;
  bool written;
};

class Stream {
 public:
  explicit Stream(Device* device);

  void Launch(const Pipeline& pipeline, const std::vector<Binding>& bindings, const std::vector<uint32_t>& push,
              const uint32_t grid[3]);
  // The source may change when this returns.
  void CopyFromHost(const char* source, Place target, uint64_t bytes);
  // The target is there when this returns.
  void CopyToHost(Place source, char* target, uint64_t bytes);
  void Copy(Place source, Place target, uint64_t bytes);
  // Destroys a buffer when no command needs it any more.
  void Release(std::unique_ptr<Buffer> buffer);
  // Waits for all commands.
  void Synchronize();

 private:
  // Commands that are submitted together, and what they need until they are done.
  struct Batch {
    VkCommandPool pool = VK_NULL_HANDLE;
    VkCommandBuffer commands = VK_NULL_HANDLE;
    VkDescriptorPool descriptors = VK_NULL_HANDLE;
    VkFence fence = VK_NULL_HANDLE;
    std::unique_ptr<Buffer> staging;
    uint64_t staged = 0;
    uint32_t launches = 0;
    uint32_t bound = 0;
    bool recording = false, submitted = false;
    std::vector<std::unique_ptr<Buffer>> released;
  };
  static constexpr size_t kBatches = 4;

  Batch& Recording();
  void CreateBatch(Batch* batch);
  void Submit();
  void Wait(Batch* batch);
  // Orders what follows behind what came before, if it depends on it.
  void Use(Buffer* buffer, bool writes);
  void Barrier(VkCommandBuffer commands, VkAccessFlags after, VkPipelineStageFlags stages);
  void RecordCopy(VkBuffer source, uint64_t source_offset, VkBuffer target, uint64_t target_offset,
                  uint64_t bytes);
  bool Idle() const;

  Device* device_;
  std::array<Batch, kBatches> batches_;
  size_t current_ = 0;
  // Commands between two barriers are of one epoch. They may run in any order.
  uint64_t epoch_ = 1;
  std::unique_ptr<Buffer> read_back_;
};

}  // namespace kvq

#endif  // KVQ_VULKAN_STREAM_H_
