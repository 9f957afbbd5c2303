#include "stream.h"

#include <tvm/ffi/error.h>

#include <algorithm>
#include <cstring>

namespace kvq {

namespace {

// A batch ends with so many launches, so that a device starts while the host still records.
constexpr uint32_t kLaunches = 48;
constexpr uint32_t kDescriptors = 1024;
constexpr uint64_t kStagingBytes = 4 << 20;
constexpr VkPipelineStageFlags kStages =
    VK_PIPELINE_STAGE_COMPUTE_SHADER_BIT | VK_PIPELINE_STAGE_TRANSFER_BIT;
constexpr VkAccessFlags kWrites = VK_ACCESS_SHADER_WRITE_BIT | VK_ACCESS_TRANSFER_WRITE_BIT;
constexpr VkAccessFlags kReads = VK_ACCESS_SHADER_READ_BIT | VK_ACCESS_TRANSFER_READ_BIT;

}  // namespace

Stream::Stream(Device* device) : device_(device) {
  for (Batch& batch : batches_) CreateBatch(&batch);
}

void Stream::CreateBatch(Batch* batch) {
  VkDevice device = device_->handle();
  VkCommandPoolCreateInfo pool{VK_STRUCTURE_TYPE_COMMAND_POOL_CREATE_INFO};
  pool.queueFamilyIndex = device_->queue_family();
  device_->Check(vkCreateCommandPool(device, &pool, nullptr, &batch->pool), "vkCreateCommandPool");
  VkCommandBufferAllocateInfo commands{VK_STRUCTURE_TYPE_COMMAND_BUFFER_ALLOCATE_INFO};
  commands.commandPool = batch->pool;
  commands.commandBufferCount = 1;
  device_->Check(vkAllocateCommandBuffers(device, &commands, &batch->commands), "vkAllocateCommandBuffers");
  VkDescriptorPoolSize size{VK_DESCRIPTOR_TYPE_STORAGE_BUFFER, kDescriptors};
  VkDescriptorPoolCreateInfo descriptors{VK_STRUCTURE_TYPE_DESCRIPTOR_POOL_CREATE_INFO};
  descriptors.maxSets = kLaunches;
  descriptors.poolSizeCount = 1;
  descriptors.pPoolSizes = &size;
  device_->Check(vkCreateDescriptorPool(device, &descriptors, nullptr, &batch->descriptors),
                 "vkCreateDescriptorPool");
  VkFenceCreateInfo fence{VK_STRUCTURE_TYPE_FENCE_CREATE_INFO};
  device_->Check(vkCreateFence(device, &fence, nullptr, &batch->fence), "vkCreateFence");
}

Stream::Batch& Stream::Recording() {
  device_->CheckAlive();
  Batch& batch = batches_[current_];
  if (batch.recording) return batch;
  Wait(&batch);
  VkCommandBufferBeginInfo begin{VK_STRUCTURE_TYPE_COMMAND_BUFFER_BEGIN_INFO};
  begin.flags = VK_COMMAND_BUFFER_USAGE_ONE_TIME_SUBMIT_BIT;
  device_->Check(vkBeginCommandBuffer(batch.commands, &begin), "vkBeginCommandBuffer");
  batch.recording = true;
  return batch;
}

void Stream::Submit() {
  Batch& batch = batches_[current_];
  if (!batch.recording) return;
  Barrier(batch.commands, VK_ACCESS_HOST_READ_BIT, VK_PIPELINE_STAGE_HOST_BIT);
  batch.recording = false;
  device_->Check(vkEndCommandBuffer(batch.commands), "vkEndCommandBuffer");
  VkSubmitInfo submit{VK_STRUCTURE_TYPE_SUBMIT_INFO};
  submit.commandBufferCount = 1;
  submit.pCommandBuffers = &batch.commands;
  device_->Check(vkQueueSubmit(device_->queue(), 1, &submit, batch.fence), "vkQueueSubmit");
  batch.submitted = true;
  current_ = (current_ + 1) % kBatches;
}

void Stream::Wait(Batch* batch) {
  if (!batch->submitted) return;
  VkDevice device = device_->handle();
  device_->Check(vkWaitForFences(device, 1, &batch->fence, VK_TRUE, UINT64_MAX), "vkWaitForFences");
  batch->submitted = false;
  device_->Check(vkResetFences(device, 1, &batch->fence), "vkResetFences");
  device_->Check(vkResetCommandPool(device, batch->pool, 0), "vkResetCommandPool");
  device_->Check(vkResetDescriptorPool(device, batch->descriptors, 0), "vkResetDescriptorPool");
  for (const auto& buffer : batch->released) device_->DestroyBuffer(*buffer);
  batch->released.clear();
  batch->staged = batch->launches = batch->bound = 0;
}

bool Stream::Idle() const {
  return std::none_of(batches_.begin(), batches_.end(),
                      [](const Batch& batch) { return batch.recording || batch.submitted; });
}

void Stream::Synchronize() {
  device_->CheckAlive();
  Submit();
  for (size_t i = 0; i < kBatches; ++i) Wait(&batches_[(current_ + i) % kBatches]);
}

void Stream::Barrier(VkCommandBuffer commands, VkAccessFlags after, VkPipelineStageFlags stages) {
  VkMemoryBarrier barrier{VK_STRUCTURE_TYPE_MEMORY_BARRIER};
  barrier.srcAccessMask = kWrites;
  barrier.dstAccessMask = after;
  vkCmdPipelineBarrier(commands, kStages, stages, 0, 1, &barrier, 0, nullptr, 0, nullptr);
}

void Stream::Use(Buffer* buffer, bool writes) {
  if (buffer->written == epoch_ || (writes && buffer->read == epoch_)) {
    Barrier(Recording().commands, kReads | kWrites, kStages);
    ++epoch_;
  }
}

void Stream::Launch(const Pipeline& pipeline, const std::vector<Binding>& bindings,
                    const std::vector<uint32_t>& push, const uint32_t grid[3]) {
  uint32_t count = static_cast<uint32_t>(bindings.size());
  if (batches_[current_].recording &&
      (batches_[current_].launches == kLaunches || batches_[current_].bound + count > kDescriptors)) {
    Submit();
  }
  Batch& batch = Recording();
  for (const Binding& binding : bindings) Use(binding.place.buffer, binding.written);
  for (const Binding& binding : bindings) {
    (binding.written ? binding.place.buffer->written : binding.place.buffer->read) = epoch_;
  }
  VkDescriptorSetAllocateInfo allocate{VK_STRUCTURE_TYPE_DESCRIPTOR_SET_ALLOCATE_INFO};
  allocate.descriptorPool = batch.descriptors;
  allocate.descriptorSetCount = 1;
  allocate.pSetLayouts = &pipeline.descriptors;
  VkDescriptorSet set;
  device_->Check(vkAllocateDescriptorSets(device_->handle(), &allocate, &set), "vkAllocateDescriptorSets");
  ++batch.launches;
  batch.bound += count;
  std::vector<VkDescriptorBufferInfo> buffers(count);
  std::vector<VkWriteDescriptorSet> writes(count, {VK_STRUCTURE_TYPE_WRITE_DESCRIPTOR_SET});
  for (uint32_t i = 0; i < count; ++i) {
    buffers[i] = {bindings[i].place.buffer->handle, bindings[i].place.offset, VK_WHOLE_SIZE};
    writes[i].dstSet = set;
    writes[i].dstBinding = i;
    writes[i].descriptorCount = 1;
    writes[i].descriptorType = VK_DESCRIPTOR_TYPE_STORAGE_BUFFER;
    writes[i].pBufferInfo = &buffers[i];
  }
  vkUpdateDescriptorSets(device_->handle(), count, writes.data(), 0, nullptr);
  vkCmdBindPipeline(batch.commands, VK_PIPELINE_BIND_POINT_COMPUTE, pipeline.handle);
  vkCmdBindDescriptorSets(batch.commands, VK_PIPELINE_BIND_POINT_COMPUTE, pipeline.layout, 0, 1, &set, 0,
                          nullptr);
  if (!push.empty()) {
    vkCmdPushConstants(batch.commands, pipeline.layout, VK_SHADER_STAGE_COMPUTE_BIT, 0,
                       static_cast<uint32_t>(4 * push.size()), push.data());
  }
  vkCmdDispatch(batch.commands, grid[0], grid[1], grid[2]);
}

void Stream::RecordCopy(VkBuffer source, uint64_t source_offset, VkBuffer target, uint64_t target_offset,
                        uint64_t bytes) {
  VkBufferCopy region{source_offset, target_offset, bytes};
  vkCmdCopyBuffer(Recording().commands, source, target, 1, &region);
}

void Stream::CopyFromHost(const char* source, Place target, uint64_t bytes) {
  device_->CheckAlive();
  if (target.buffer->mapped && Idle()) {
    std::memcpy(target.buffer->mapped + target.offset, source, bytes);
    return;
  }
  for (uint64_t done = 0; done < bytes;) {
    if (batches_[current_].recording && batches_[current_].staged == kStagingBytes) Submit();
    Batch& batch = Recording();
    if (!batch.staging) batch.staging = device_->CreateBuffer(kStagingBytes, MemoryUse::kUpload);
    uint64_t count = std::min(bytes - done, kStagingBytes - batch.staged);
    std::memcpy(batch.staging->mapped + batch.staged, source + done, count);
    Use(target.buffer, true);
    RecordCopy(batch.staging->handle, batch.staged, target.buffer->handle, target.offset + done, count);
    target.buffer->written = epoch_;
    // the next copy starts at a multiple of what devices copy fast
    batch.staged = std::min(kStagingBytes, (batch.staged + count + 15) / 16 * 16);
    done += count;
  }
}

void Stream::CopyToHost(Place source, char* target, uint64_t bytes) {
  device_->CheckAlive();
  if (source.buffer->mapped) {
    Synchronize();
    std::memcpy(target, source.buffer->mapped + source.offset, bytes);
    return;
  }
  if (!read_back_) read_back_ = device_->CreateBuffer(kStagingBytes, MemoryUse::kReadBack);
  for (uint64_t done = 0; done < bytes;) {
    uint64_t count = std::min(bytes - done, kStagingBytes);
    Use(source.buffer, false);
    RecordCopy(source.buffer->handle, source.offset + done, read_back_->handle, 0, count);
    source.buffer->read = epoch_;
    Synchronize();
    std::memcpy(target + done, read_back_->mapped, count);
    done += count;
  }
}

void Stream::Copy(Place source, Place target, uint64_t bytes) {
  Use(source.buffer, false);
  Use(target.buffer, true);
  RecordCopy(source.buffer->handle, source.offset, target.buffer->handle, target.offset, bytes);
  source.buffer->read = epoch_;
  target.buffer->written = epoch_;
}

void Stream::Release(std::unique_ptr<Buffer> buffer) {
  for (size_t i = 0; i < kBatches; ++i) {
    // of the batches that run, the one that was submitted last ends last
    Batch& batch = batches_[(current_ + kBatches - i) % kBatches];
    if (batch.recording || batch.submitted) {
      batch.released.push_back(std::move(buffer));
      return;
    }
  }
  device_->DestroyBuffer(*buffer);
}

}  // namespace kvq
