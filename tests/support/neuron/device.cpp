// A device type for tests: PrivateUse1, whose tensors are in host memory and whose kernels are those of the CPU.
//
//   operator on device tensors --> rules --> the same memory seen as CPU tensors --> CPU kernel --> device tensors
//
// Nothing is copied. What a Neuron device refuses or does in another way (rules.py lists that, with sources) is refused
// here too, unless a test allows it. Operators, shapes, waits of the host and fallbacks are counted per step.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <c10/util/hash.h>
#include <pthread.h>
#include <torch/library.h>

#include <atomic>
#include <cstring>
#include <map>
#include <mutex>
#include <sstream>
#include <string>
#include <unordered_set>

namespace {

constexpr auto DEVICE = c10::DeviceType::PrivateUse1;
std::atomic<int64_t> memory{int64_t(24) << 30};  // of one logical core

// ---- Rules that a test may turn off, by name ------------------------------------------------------------------------

bool refuse_float64 = true, refuse_unsigned = true, refuse_determinism = true, refuse_fork = true, refuse_index = true;

const std::map<std::string, bool*> RULES = {
    {"float64", &refuse_float64},  {"unsigned", &refuse_unsigned}, {"determinism", &refuse_determinism},
    {"fork", &refuse_fork},        {"one-device", &refuse_index},
};

void check_dtype(const at::Tensor& tensor, const std::string& where) {
  const auto type = tensor.scalar_type();
  TORCH_CHECK(!(refuse_float64 && type == at::kDouble), "neuron [float64]: ", where, " uses float64");
  const bool is_unsigned = type == at::kUInt16 || type == at::kUInt32 || type == at::kUInt64;
  TORCH_CHECK(!(refuse_unsigned && is_unsigned), "neuron [unsigned]: ", where, " uses ", type);
}

// ---- Runtime and devices --------------------------------------------------------------------------------------------

std::atomic<bool> initialized{false}, forked{false};
std::atomic<int> visible{2}, first_index{0}, in_process{2}, process_default{0};
thread_local int chosen = -1;  // the choice is per thread; others use that of the process

int current_index() { return chosen >= 0 ? chosen : process_default.load(); }

void initialize() {
  TORCH_CHECK(!(refuse_fork && forked), "neuron [fork]: the runtime cannot be used in a forked process; spawn instead");
  initialized = true;
}

void choose(int index) {
  const int first = first_index, last = first + in_process - 1;
  TORCH_CHECK(!refuse_index || (index >= first && index <= last), "neuron [one-device]: device index ", index,
              " is out of range: this process has ", first, " to ", last);
  initialize();
  chosen = index;
}

void after_fork() {
  if (initialized) forked = true;
  initialized = false;
}

// ---- Errors that are seen late: an operator fails, and whoever waits for the device is told, then and ever after --

std::atomic<int> next_status{0}, failed_status{0};

void fail_if_told() {
  if (const int status = next_status.exchange(0)) failed_status = status;
}

void check_earlier() {
  const int status = failed_status;
  TORCH_CHECK(status == 0, "Neuron execution failed: nrt_execute status=", status);
}

// ---- What happened, by step -----------------------------------------------------------------------------------------

thread_local bool in_graph = false;  // a compiled graph is one launch, whatever its operators

struct Counts {
  int64_t operators = 0, shapes = 0, constants = 0, fallbacks = 0, waits = 0, uploads = 0;
  std::map<std::string, int64_t> kinds;
};
std::mutex counting;
Counts counts;
std::unordered_set<size_t> known_shapes, known_constants;

// Operators that the beta computes on the host: random numbers, and results whose shape depends on values.
bool falls_back(const std::string& name) {
  static const char* const NAMES[] = {"normal_", "uniform_", "random_",  "bernoulli", "randn",        "rand",
                                      "randperm", "randint", "multinomial", "dropout",   "nonzero",      "masked_select",
                                      "unique",   "exponential_", "native_dropout"};
  const auto bare = name.substr(name.rfind(':') + 1);
  for (const auto* each : NAMES)
    if (bare.rfind(each, 0) == 0) return true;
  return false;
}

size_t hash_shape(const at::Tensor& tensor) {
  auto hash = c10::hash_combine(static_cast<size_t>(tensor.scalar_type()), tensor.dim());
  for (const auto size : tensor.sizes()) hash = c10::hash_combine(hash, static_cast<size_t>(size));
  return hash;
}

size_t hash_constant(const c10::IValue& value) {
  if (value.isDouble()) return std::hash<double>()(value.toDouble());
  if (value.isInt()) return std::hash<int64_t>()(value.toInt());
  if (value.isScalar()) return std::hash<double>()(value.toScalar().isComplex() ? 0.0 : value.toScalar().toDouble());
  return 0;
}

// ---- Memory: storages of the device are host memory -----------------------------------------------------------------

std::atomic<int64_t> held{0}, peak{0};

void grow(int64_t bytes) {
  const auto now = held += bytes;
  if (now > memory) {
    held -= bytes;
    TORCH_CHECK(false, "Failed to allocate Neuron tensor of size ", bytes, " bytes (out of memory). Status: 4");
  }
  auto before = peak.load();
  while (now > before && !peak.compare_exchange_weak(before, now)) {
  }
}

struct Owner {  // keeps the memory that a storage of the other device type shows
  c10::Storage shown;
  int64_t counted;
};

void release(void* owner) {
  held -= static_cast<Owner*>(owner)->counted;
  delete static_cast<Owner*>(owner);
}

struct DeviceMemory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    grow(static_cast<int64_t>(bytes));
    auto shown = c10::GetCPUAllocator()->allocate(bytes);
    auto* data = shown.get();
    c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, std::move(shown), nullptr, false);
    return {data, new Owner{std::move(storage), static_cast<int64_t>(bytes)}, &release,
            c10::Device(DEVICE, static_cast<c10::DeviceIndex>(current_index()))};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override { peak = held.load(); }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex) override {
    return {static_cast<size_t>(memory - held), static_cast<size_t>(memory)};
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    const auto total = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    for (auto* each : {&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes}) {
      (*each)[total].current = held;
      (*each)[total].peak = peak;
    }
    return stats;
  }
} device_memory;
REGISTER_ALLOCATOR(DEVICE, &device_memory);

c10::Storage shown_as(const c10::Storage& storage, c10::Device device) {
  const auto bytes = static_cast<int64_t>(storage.nbytes());
  const bool on_device = device.type() == DEVICE;
  if (on_device) grow(bytes);
  c10::DataPtr data(const_cast<void*>(storage.data()), new Owner{storage, on_device ? bytes : 0}, &release, device);
  auto* allocator = on_device ? static_cast<c10::Allocator*>(&device_memory) : c10::GetCPUAllocator();
  return c10::Storage(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(data), allocator, true);
}

at::Tensor with_storage(const at::Tensor& like, c10::Storage storage, c10::DispatchKey key) {
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype());
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  if (like.is_conj()) tensor._set_conj(true);
  if (like.is_neg()) tensor._set_neg(true);
  return tensor;
}

// Tensors of one call, seen from the other side: two views of one storage stay views of one storage.
class Sides {
 public:
  at::Tensor on_host(const at::Tensor& tensor) {
    if (!tensor.defined() || tensor.device().type() != DEVICE) return tensor;
    for (auto& [ours, theirs] : pairs_)
      if (ours.unsafeGetStorageImpl() == tensor.storage().unsafeGetStorageImpl())
        return with_storage(tensor, theirs, c10::DispatchKey::CPU);
    pairs_.emplace_back(tensor.storage(), shown_as(tensor.storage(), c10::kCPU));
    return with_storage(tensor, pairs_.back().second, c10::DispatchKey::CPU);
  }
  at::Tensor on_device(const at::Tensor& tensor, int index) {
    if (!tensor.defined() || tensor.device().type() != c10::kCPU) return tensor;
    for (auto& [ours, theirs] : pairs_)
      if (theirs.unsafeGetStorageImpl() == tensor.storage().unsafeGetStorageImpl())
        return with_storage(tensor, ours, c10::DispatchKey::PrivateUse1);
    const c10::Device device(DEVICE, static_cast<c10::DeviceIndex>(index));
    pairs_.emplace_back(shown_as(tensor.storage(), device), tensor.storage());
    return with_storage(tensor, pairs_.back().first, c10::DispatchKey::PrivateUse1);
  }

 private:
  std::vector<std::pair<c10::Storage, c10::Storage>> pairs_;  // of the device, of the host
};

// ---- Every operator -------------------------------------------------------------------------------------------------

class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack* stack)
      : op_(op), stack_(stack), name_(op.schema().name()), shape_(std::hash<std::string>()(c10::toString(op.operator_name()))) {}

  void run() {
    initialize();
    fail_if_told();
    TORCH_CHECK(!(refuse_determinism && at::globalContext().deterministicAlgorithms()),
                "neuron [determinism]: torch's deterministic mode turns fused execution off");
    const auto& arguments = op_.schema().arguments();
    const auto begin = stack_->size() - arguments.size();
    for (size_t i = 0; i < arguments.size(); i++) {
      const auto* alias = arguments[i].alias_info();
      (*stack_)[begin + i] = to_host((*stack_)[begin + i], alias != nullptr && alias->isWrite());
    }
    if (index_ < 0) index_ = current_index();
    count();
    op_.callBoxed(stack_);
    for (auto& [ours, seen] : written_) adopt(ours, seen);
    const auto results = op_.schema().returns().size();
    for (size_t i = stack_->size() - results; i < stack_->size(); i++) (*stack_)[i] = to_device((*stack_)[i]);
  }

 private:
  c10::IValue to_host(const c10::IValue& value, bool writes) {
    if (value.isTensor()) return see(value.toTensor(), writes);
    if (value.isTensorList()) {
      c10::List<at::Tensor> seen;
      for (const at::Tensor& each : value.toTensorVector()) seen.push_back(see(each, writes));
      return seen;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> seen;
      for (const std::optional<at::Tensor>& each : value.toOptionalTensorVector())
        seen.push_back(each.has_value() ? std::optional<at::Tensor>(see(*each, writes)) : std::nullopt);
      return seen;
    }
    if (value.isDevice() && value.toDevice().type() == DEVICE) {
      index_ = value.toDevice().has_index() ? value.toDevice().index() : current_index();
      return c10::Device(c10::kCPU);
    }
    constant_ = c10::hash_combine(constant_, hash_constant(value));
    return value;
  }

  at::Tensor see(const at::Tensor& tensor, bool writes) {
    if (!tensor.defined()) return tensor;
    if (tensor.device().type() != DEVICE) {
      TORCH_CHECK(tensor.dim() == 0 || tensor.device().type() != c10::kCPU, "neuron: ", name_,
                  " expects all tensors on the same device, and one is on the CPU");
      return tensor;
    }
    check_dtype(tensor, name_);
    const int index = tensor.device().index();
    TORCH_CHECK(index_ < 0 || index == index_, "neuron: ", name_, " got tensors of devices ", index_, " and ", index);
    index_ = index;
    shape_ = c10::hash_combine(shape_, hash_shape(tensor));
    auto seen = sides_.on_host(tensor);
    if (writes) written_.emplace_back(tensor, seen);
    return seen;
  }

  c10::IValue to_device(const c10::IValue& value) {
    if (value.isTensor()) return result(value.toTensor());
    if (value.isTensorList()) {
      c10::List<at::Tensor> results;
      for (const at::Tensor& each : value.toTensorVector()) results.push_back(result(each));
      return results;
    }
    return value;
  }

  at::Tensor result(const at::Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    check_dtype(tensor, name_);
    for (auto& [ours, seen] : written_)
      if (seen.unsafeGetTensorImpl() == tensor.unsafeGetTensorImpl()) return ours;
    return sides_.on_device(tensor, index_);
  }

  // Takes over size and memory that the CPU kernel gave to an out= tensor.
  static void adopt(const at::Tensor& ours, const at::Tensor& seen) {
    if (seen.storage().data() != ours.storage().data()) {
      auto fresh = shown_as(seen.storage(), ours.device());
      auto* impl = ours.storage().unsafeGetStorageImpl();
      impl->set_data_ptr_noswap(std::move(fresh.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks()));
      impl->set_nbytes(seen.storage().nbytes());
    }
    if (seen.sizes() != ours.sizes() || seen.strides() != ours.strides())
      ours.unsafeGetTensorImpl()->set_sizes_and_strides(seen.sizes(), seen.strides(), seen.storage_offset());
  }

  void count() {
    if (in_graph) return;
    std::lock_guard<std::mutex> lock(counting);
    counts.operators++;
    counts.kinds[name_]++;
    counts.fallbacks += falls_back(name_);
    counts.shapes += known_shapes.insert(shape_).second;
    counts.constants += known_constants.insert(c10::hash_combine(shape_, constant_)).second;
  }

  const c10::OperatorHandle& op_;
  torch::jit::Stack* stack_;
  std::string name_;
  size_t shape_, constant_ = 0;
  int index_ = -1;
  Sides sides_;
  std::vector<std::pair<at::Tensor, at::Tensor>> written_;  // ours, as seen by the kernel
};

void every_operator(const c10::OperatorHandle& op, torch::jit::Stack* stack) { Call(op, stack).run(); }

// ---- Operators that the CPU cannot do for us ------------------------------------------------------------------------

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  initialize();
  const bool reads = to.device().type() == c10::kCPU;
  if (reads) check_earlier();
  check_dtype(reads ? from : to, "a copy");
  {
    std::lock_guard<std::mutex> lock(counting);
    const bool writes = from.device().type() == c10::kCPU;
    counts.waits += (reads || writes) && !non_blocking;  // a blocking copy to the device waits for its queue too
    counts.uploads += writes;
  }
  Sides sides;
  sides.on_host(to).copy_(sides.on_host(from));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  at::native::resize_(to, from.sizes());
  return copy_from(from, to, false);
}

at::Scalar read_scalar(const at::Tensor& tensor) {
  check_earlier();
  {
    std::lock_guard<std::mutex> lock(counting);
    counts.waits++;
    counts.kinds["aten::_local_scalar_dense"]++;
  }
  Sides sides;
  return at::_local_scalar_dense(sides.on_host(tensor));
}

at::Tensor& set_storage_offset(at::Tensor& self, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef size,
                               c10::SymIntArrayRef stride) {
  const auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  const auto contiguous = c10::TensorType::contiguousStridesOf(sizes);
  const auto strides = stride.data() != nullptr ? C10_AS_INTARRAYREF_SLOW(stride) : c10::IntArrayRef(contiguous);
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
  self.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset.guard_int(__FILE__, __LINE__));
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source) {
  const auto count = static_cast<int64_t>(source.nbytes() / self.dtype().itemsize());
  return set_storage_offset(self, std::move(source), 0, {c10::SymInt(count)}, {c10::SymInt(1)});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage_offset(self, source.storage(), source.sym_storage_offset(), source.sym_sizes(),
                            source.sym_strides());
}

const at::Tensor& resize(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  const auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  const auto needed = static_cast<size_t>(c10::multiply_integers(sizes) + self.storage_offset()) * self.dtype().itemsize();
  if (self.storage().nbytes() < needed) at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(self.storage(), needed);
  self.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return self;
}

at::Tensor see_on_host(const at::Tensor& tensor) {
  Sides sides;
  return sides.on_host(tensor);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&every_operator>()); }
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &read_scalar);
  m.impl("set_.source_Storage_storage_offset", &set_storage_offset);
  m.impl("set_.source_Storage", &set_storage);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("resize_", &resize);
}
TORCH_LIBRARY(hlat_stand_in, m) { m.def("on_host(Tensor tensor) -> Tensor"); }
TORCH_LIBRARY_IMPL(hlat_stand_in, PrivateUse1, m) { m.impl("on_host", &see_on_host); }

// ---- What torch asks of every device type; streams and events are trivial, because a call returns when it is done ---

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return DEVICE; }
  c10::Device getDevice() const override { return {DEVICE, static_cast<c10::DeviceIndex>(current_index())}; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = getDevice();
    uncheckedSetDevice(device);
    return before;
  }
  void setDevice(c10::Device device) const override { choose(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { chosen = device.index(); }
  c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(visible.load()); }
  c10::Stream stream(c10::Device device) const { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream getStream(c10::Device device) const override { return stream(device); }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream(device); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return stream(device); }
  c10::Stream getNewStream(c10::Device device, int) const override { return stream(device); }
  c10::Stream exchangeStream(c10::Stream given) const override { return given; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override { check_earlier(); }
  void synchronizeDevice(const c10::DeviceIndex) const override { check_earlier(); }
  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {
    *event = &device_memory;
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override { check_earlier(); }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  double elapsedTime(void*, void*, const c10::DeviceIndex) const override { return 0.0; }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return visible > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return initialized; }
  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(visible.load()); }
  c10::DeviceIndex getCurrentDevice() const override { return static_cast<c10::DeviceIndex>(current_index()); }
  void setCurrentDevice(c10::DeviceIndex index) const override { choose(index); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    const auto before = getCurrentDevice();
    chosen = index;
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return index < 0 ? getCurrentDevice() : exchangeDevice(index);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::make_generator<at::CPUGeneratorImpl>(); }
  at::Device getDeviceFromPtr(void*) const override { return {DEVICE, getCurrentDevice()}; }
  at::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto fresh = device_memory.allocate(bytes);
    const auto kept = std::min(bytes, storage.nbytes());
    if (kept > 0) std::memcpy(fresh.get(), storage.data(), kept);
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(fresh));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
} hooks;

std::string written;  // text that the last call of stand_in_counts returned

}  // namespace

// ---- For Python, through ctypes -------------------------------------------------------------------------------------

extern "C" {

void stand_in_install(int devices) {
  at::RegisterPrivateUse1HooksInterface(&hooks);
  pthread_atfork(nullptr, nullptr, &after_fork);
  visible = in_process = devices;
}

int stand_in_allow(const char* rule) {
  const auto found = RULES.find(rule);
  if (found == RULES.end()) return 0;
  *found->second = false;
  return 1;
}

void stand_in_start() { initialize(); }
void stand_in_limit_memory(int64_t bytes) { memory = bytes; }
void stand_in_fail_next(int status) { next_status = status; }

// Give this process one device of the machine; the number that it sees, and the index of its own.
void stand_in_assign(int seen, int index) {
  visible = seen;
  first_index = process_default = index;
  in_process = 1;
  chosen = index;
  initialize();
}

void stand_in_begin_graph() {
  std::lock_guard<std::mutex> lock(counting);
  counts.operators++;
  counts.kinds["graph"]++;
  in_graph = true;
}

void stand_in_end_graph() { in_graph = false; }
int stand_in_is_initialized() { return initialized; }
int stand_in_is_in_bad_fork() { return forked; }
int stand_in_device_count() { return visible; }
int stand_in_current_device() { return current_index(); }
int64_t stand_in_memory() { return held; }
int64_t stand_in_peak_memory() { return peak; }

// Counts since the last call, as JSON.
const char* stand_in_counts() {
  std::lock_guard<std::mutex> lock(counting);
  std::ostringstream text;
  text << "{\"operators\": " << counts.operators << ", \"shapes\": " << counts.shapes << ", \"constants\": "
       << counts.constants << ", \"fallbacks\": " << counts.fallbacks << ", \"waits\": " << counts.waits
       << ", \"uploads\": " << counts.uploads << ", \"kinds\": {";
  const char* separator = "";
  for (const auto& [name, number] : counts.kinds) {
    text << separator << "\"" << name << "\": " << number;
    separator = ", ";
  }
  text << "}}";
  written = text.str();
  counts = Counts();
  return written.c_str();
}
}
