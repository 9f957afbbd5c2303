// A library's kernels as a module of TVM's runtime.
#include <tvm/ffi/container/map.h>
#include <tvm/ffi/extra/module.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/reflection/registry.h>

#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "current_device.h"
#include "device.h"
#include "kernel_code.h"
#include "stream.h"

namespace kvq {

namespace ffi = tvm::ffi;

namespace {

// A kernel, and its pipelines on the devices that ran it.
class Kernel {
 public:
  explicit Kernel(KernelCode code) : code_(std::move(code)) {}

  const KernelCode& code() const { return code_; }

  void Launch(ffi::PackedArgs args) {
    Device& device = Devices::Get().Open(CurrentDevice());
    std::lock_guard<std::mutex> lock(device.mutex());
    size_t count = code_.arguments.size();
    TVM_FFI_ICHECK_EQ(args.size(), static_cast<int>(count + code_.grid.size())) << code_.name;
    std::vector<Binding> bindings;
    std::vector<uint32_t> push;
    for (size_t i = 0; i < count; ++i) {
      switch (code_.arguments[i]) {
        case 'i':
          push.push_back(Word(args[i].cast<int64_t>()));
          break;
        case 'f':
          push.push_back(Word(static_cast<float>(args[i].cast<double>())));
          break;
        default:
          bindings.push_back({FindArgument(device, args[i].cast<void*>()), code_.arguments[i] == 'w'});
      }
    }
    uint32_t grid[3] = {1, 1, 1};
    for (size_t i = 0; i < code_.grid.size(); ++i) {
      if (code_.grid[i] == '-') continue;
      int axis = code_.grid[i] - 'x';
      int64_t extent = args[count + i].cast<int64_t>();
      if (extent == 0) return;  // nothing to do
      if (extent < 0 || extent > device.limits().grid[axis]) {
        TVM_FFI_THROW(RuntimeError) << device.Describe() << ": kernel " << code_.name << " wants " << extent
                                    << " workgroups along " << code_.grid[i] << ", at most "
                                    << device.limits().grid[axis] << " can be had (maxComputeWorkGroupCount)";
      }
      grid[axis] = static_cast<uint32_t>(extent);
    }
    auto found = pipelines_.find(&device);
    if (found == pipelines_.end()) found = pipelines_.emplace(&device, device.CreatePipeline(code_)).first;
    device.stream().Launch(found->second, bindings, push, grid);
  }

 private:
  uint32_t Word(int64_t value) const {
    if (value < std::numeric_limits<int32_t>::min() || value > std::numeric_limits<int32_t>::max()) {
      TVM_FFI_THROW(RuntimeError) << "Vulkan kernel " << code_.name << ": argument " << value
                                  << " does not fit in 32 bits, in which kernels compute indices";
    }
    return static_cast<uint32_t>(value);
  }

  static uint32_t Word(float value) {
    uint32_t word;
    std::memcpy(&word, &value, sizeof word);
    return word;
  }

  Place FindArgument(Device& device, void* data) const {
    Place place = device.addresses().Find(data);
    uint64_t alignment = device.limits().offset_alignment;
    if (place.offset % alignment) {
      TVM_FFI_THROW(RuntimeError) << device.Describe() << ": a tensor of kernel " << code_.name << " starts "
                                  << place.offset << " bytes into its buffer: a multiple of " << alignment
                                  << " is needed (minStorageBufferOffsetAlignment)";
    }
    return place;
  }

  KernelCode code_;
  std::map<Device*, Pipeline> pipelines_;
};

class VulkanModule final : public ffi::ModuleObj {
 public:
  explicit VulkanModule(std::string bytes) : bytes_(std::move(bytes)) {
    for (KernelCode& code : ParseKernels(bytes_)) {
      std::string name = code.name;
      kernels_[name] = std::make_shared<Kernel>(std::move(code));
    }
  }

  const char* kind() const final { return "vulkan"; }
  int GetPropertyMask() const final {
    return ffi::Module::kBinarySerializable | ffi::Module::kRunnable;
  }
  ffi::Bytes SaveToBytes() const final { return ffi::Bytes(bytes_); }

  ffi::Optional<ffi::Function> GetFunction(const ffi::String& name) final {
    auto found = kernels_.find(name);
    if (found == kernels_.end()) return std::nullopt;
    return ffi::Function::FromPacked(
        [kernel = found->second](ffi::PackedArgs args, ffi::Any*) { kernel->Launch(args); });
  }

  void CheckRuns(const Device& device) const {
    for (const auto& [name, kernel] : kernels_) device.CheckRuns(kernel->code());
  }

  // The SPIR-V of each kernel, by name.
  ffi::Map<ffi::String, ffi::Bytes> Spirv() const {
    ffi::Map<ffi::String, ffi::Bytes> out;
    for (const auto& [name, kernel] : kernels_) {
      const std::vector<uint32_t>& words = kernel->code().spirv;
      out.Set(name, ffi::Bytes(reinterpret_cast<const char*>(words.data()), 4 * words.size()));
    }
    return out;
  }

 private:
  std::string bytes_;
  std::map<std::string, std::shared_ptr<Kernel>> kernels_;
};

const VulkanModule* AsVulkan(const ffi::Module& module) {
  TVM_FFI_ICHECK_EQ(std::string(module->kind()), "vulkan") << "not a module of Vulkan kernels";
  return static_cast<const VulkanModule*>(module.operator->());
}

}  // namespace

TVM_FFI_STATIC_INIT_BLOCK() {
  namespace refl = tvm::ffi::reflection;
  refl::GlobalDef()
      .def("ffi.Module.load_from_bytes.vulkan",
           [](ffi::Bytes bytes) {
             return ffi::Module(ffi::make_object<VulkanModule>(std::string(bytes.data(), bytes.size())));
           })
      .def("kvq_vulkan.check",
           [](ffi::Module module, int64_t id) {
             AsVulkan(module)->CheckRuns(Devices::Get().Open(static_cast<int>(id)));
           })
      .def("kvq_vulkan.spirv", [](ffi::Module module) { return AsVulkan(module)->Spirv(); });
}

}  // namespace kvq
