// TVM's view of the devices: memory, copies, attributes.
#include <tvm/ffi/container/map.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/reflection/registry.h>
#include <tvm/runtime/device_api.h>

#include <string>
#include <vector>

#include "current_device.h"
#include "device.h"
#include "stream.h"

namespace kvq {

using tvm::runtime::DeviceAPI;

namespace {

thread_local int current_device = 0;

class VulkanDeviceApi final : public DeviceAPI {
 public:
  static VulkanDeviceApi* Get() {
    static VulkanDeviceApi* api = new VulkanDeviceApi();
    return api;
  }

  void SetDevice(DLDevice device) final { current_device = device.device_id; }

  void GetAttr(DLDevice device, tvm::runtime::DeviceAttrKind kind, tvm::ffi::Any* rv) final {
    Devices& devices = Devices::Get();
    bool exists = device.device_id >= 0 && device.device_id < devices.count();
    if (kind == tvm::runtime::kExist) {
      *rv = static_cast<int64_t>(exists);
      return;
    }
    if (!exists) devices.Open(device.device_id);  // says what is wrong
    const Limits& limits = devices.limits(device.device_id);
    switch (kind) {
      case tvm::runtime::kMaxThreadsPerBlock:
        *rv = static_cast<int64_t>(limits.threads);
        break;
      case tvm::runtime::kWarpSize:
        *rv = static_cast<int64_t>(limits.subgroup ? limits.subgroup : 1);
        break;
      case tvm::runtime::kMaxSharedMemoryPerBlock:
        *rv = static_cast<int64_t>(limits.shared_bytes);
        break;
      case tvm::runtime::kComputeVersion:
        *rv = tvm::ffi::String(std::to_string(VK_API_VERSION_MAJOR(limits.api_version)) + "." +
                               std::to_string(VK_API_VERSION_MINOR(limits.api_version)));
        break;
      case tvm::runtime::kDeviceName:
        *rv = tvm::ffi::String(limits.name);
        break;
      case tvm::runtime::kMultiProcessorCount:
        *rv = static_cast<int64_t>(limits.compute_units);
        break;
      case tvm::runtime::kApiVersion:
        *rv = static_cast<int64_t>(limits.api_version);
        break;
      case tvm::runtime::kDriverVersion:
        *rv = static_cast<int64_t>(limits.driver_version);
        break;
      case tvm::runtime::kTotalGlobalMemory:
        *rv = static_cast<int64_t>(devices.Open(device.device_id).TotalMemory());
        break;
      case tvm::runtime::kAvailableGlobalMemory:
        *rv = static_cast<int64_t>(devices.Open(device.device_id).FreeMemory());
        break;
      default:  // unknown here: None
        break;
    }
  }

  void* AllocDataSpace(DLDevice device, size_t bytes, size_t, DLDataType) final {
    Device& opened = Devices::Get().Open(device.device_id);
    std::lock_guard<std::mutex> lock(opened.mutex());
    return opened.addresses().Insert(opened.CreateBuffer(bytes, MemoryUse::kDevice));
  }

  void FreeDataSpace(DLDevice device, void* data) final {
    Device& opened = Devices::Get().Open(device.device_id);
    std::lock_guard<std::mutex> lock(opened.mutex());
    opened.stream().Release(opened.addresses().Remove(data));
  }

  void StreamSync(DLDevice device, TVMStreamHandle) final {
    Device& opened = Devices::Get().Open(device.device_id);
    std::lock_guard<std::mutex> lock(opened.mutex());
    opened.stream().Synchronize();
  }

  bool SupportsDevicePointerArithmeticsOnHost() final { return true; }

 protected:
  void CopyDataFromTo(const void* from, size_t from_offset, void* to, size_t to_offset, size_t bytes,
                      DLDevice source, DLDevice target, DLDataType, TVMStreamHandle) final {
    if (bytes == 0) return;
    const char* start = static_cast<const char*>(from) + from_offset;
    char* end = static_cast<char*>(to) + to_offset;
    if (source.device_type == kDLVulkan && target.device_type == kDLVulkan) {
      if (source.device_id == target.device_id) {
        WithDevice(source, [&](Device& device) {
          device.stream().Copy(device.addresses().Find(start), device.addresses().Find(end), bytes);
        });
        return;
      }
      std::vector<char> between(bytes);
      ToHost(source, start, between.data(), bytes);
      FromHost(target, between.data(), end, bytes);
    } else if (source.device_type == kDLVulkan) {
      ToHost(source, start, end, bytes);
    } else {
      FromHost(target, start, end, bytes);
    }
  }

 private:
  template <typename Body>
  static void WithDevice(DLDevice device, Body body) {
    Device& opened = Devices::Get().Open(device.device_id);
    std::lock_guard<std::mutex> lock(opened.mutex());
    body(opened);
  }

  static void ToHost(DLDevice source, const char* from, char* to, size_t bytes) {
    WithDevice(source, [&](Device& device) {
      device.stream().CopyToHost(device.addresses().Find(from), to, bytes);
    });
  }

  static void FromHost(DLDevice target, const char* from, char* to, size_t bytes) {
    WithDevice(target, [&](Device& device) {
      device.stream().CopyFromHost(from, device.addresses().Find(to), bytes);
    });
  }
};

// What a device can do, by name.
tvm::ffi::Map<tvm::ffi::String, tvm::ffi::Any> LimitsOf(int64_t id) {
  Devices& devices = Devices::Get();
  if (id < 0 || id >= devices.count()) devices.Open(static_cast<int>(id));
  const Limits& limits = devices.limits(static_cast<int>(id));
  tvm::ffi::Map<tvm::ffi::String, tvm::ffi::Any> out;
  auto set = [&](const char* name, uint64_t value) { out.Set(name, static_cast<int64_t>(value)); };
  out.Set("name", tvm::ffi::String(limits.name));
  set("threads", limits.threads);
  set("shared_bytes", limits.shared_bytes);
  set("push_bytes", limits.push_bytes);
  set("storage_buffers", limits.storage_buffers);
  set("buffer_bytes", limits.buffer_bytes);
  set("subgroup", limits.subgroup);
  set("float16", limits.float16);
  set("storage16", limits.storage16);
  set("storage8", limits.storage8);
  set("compute_units", limits.compute_units);
  return out;
}

}  // namespace

int CurrentDevice() { return current_device; }

TVM_FFI_STATIC_INIT_BLOCK() {
  namespace refl = tvm::ffi::reflection;
  refl::GlobalDef()
      .def_packed("device_api.vulkan",
                  [](tvm::ffi::PackedArgs, tvm::ffi::Any* rv) {
                    *rv = static_cast<void*>(static_cast<DeviceAPI*>(VulkanDeviceApi::Get()));
                  })
      .def("kvq_vulkan.num_devices", []() { return static_cast<int64_t>(Devices::Get().count()); })
      .def("kvq_vulkan.problem", []() { return tvm::ffi::String(Devices::Get().problem()); })
      .def("kvq_vulkan.limits", LimitsOf)
      // what a driver's reset does, for tests
      .def("kvq_vulkan.lose_device", [](int64_t id) { Devices::Get().Open(static_cast<int>(id)).MarkLost(); });
}

}  // namespace kvq
