// Streams, events, and the capture of graphs of what is done on them.
//
// What a graph does when it is replayed, ../emulated_gpu.py knows: it is asked by the number of the capture.
#include "emulator.h"

#include <pthread.h>

#include <set>
#include <utility>

struct Stream;

struct Capture {
  size_t number;
  cudaStreamCaptureMode mode;
  Stream* origin;
  pthread_t thread = pthread_self();
  bool is_valid = true;
  std::set<Stream*> streams;
  std::set<Stream*> unjoined;  // work on them does not reach the origin yet
};

struct Stream {
  unsigned flags;
  int priority;
  Capture* capture = nullptr;
};

struct Event {
  unsigned flags;
  bool is_recorded = false;
  Stream* stream = nullptr;
  size_t capture = 0;  // in which it was recorded
};

static Stream legacy{cudaStreamDefault, 0};
static Stream of_thread{cudaStreamNonBlocking, 0};
static std::set<Capture*>& captures = *new std::set<Capture*>;  // never destroyed, as the process may end in one
static size_t captured = 0;
static void (*replay)(size_t) = nullptr;
static thread_local cudaStreamCaptureMode mode_of_thread = cudaStreamCaptureModeGlobal;

static Stream* stream_of(cudaStream_t stream) {
  if (stream == nullptr || stream == cudaStreamLegacy) return &legacy;
  return stream == cudaStreamPerThread ? &of_thread : (Stream*)stream;
}

static Event* event_of(cudaEvent_t event) { return (Event*)event; }

static cudaError_t broken(Capture* capture, cudaError_t error, const char* what) {
  capture->is_valid = false;
  return refused(error, what);
}

static Capture* capture_of(const Event* event) {
  for (Capture* capture : captures) {
    if (capture->number == event->capture) return capture;
  }
  return nullptr;
}

// Whether this thread may do nothing that could break a capture.
static bool is_guarded(const Capture* capture) {
  if (mode_of_thread == cudaStreamCaptureModeRelaxed || capture->mode == cudaStreamCaptureModeRelaxed) return false;
  if (pthread_equal(capture->thread, pthread_self())) return true;
  return capture->mode == cudaStreamCaptureModeGlobal && mode_of_thread == cudaStreamCaptureModeGlobal;
}

cudaError_t check_beside_captures(const char* what) {
  Lock lock(mutex);
  cudaError_t error = cudaSuccess;
  for (Capture* capture : captures) {
    if (is_guarded(capture)) error = broken(capture, cudaErrorStreamCaptureUnsupported, what);
  }
  return error;
}

// All that is done on the legacy stream waits for streams that block, which one that is captured cannot be.
cudaError_t check_stream(cudaStream_t stream, const char* what) {
  if (stream_of(stream) != &legacy) return cudaSuccess;
  for (Capture* capture : captures) {
    if (!(capture->origin->flags & cudaStreamNonBlocking)) return broken(capture, cudaErrorStreamCaptureImplicit, what);
  }
  return cudaSuccess;
}

cudaError_t check_waits_for(cudaStream_t stream, const char* what) {
  Capture* capture = stream_of(stream)->capture;
  if (capture) return broken(capture, cudaErrorStreamCaptureUnsupported, what);
  return check_beside_captures(what);
}

cudaError_t check_copy(cudaStream_t stream, const void* to, const void* from) {
  if (cudaError_t error = check_stream(stream, "cudaMemcpyAsync")) return error;
  Capture* capture = stream_of(stream)->capture;
  if (capture == nullptr || (is_known_memory(to) && is_known_memory(from))) return cudaSuccess;
  return broken(capture, cudaErrorStreamCaptureUnsupported, "a copy of memory that is not pinned");
}

// Streams

API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority) {
  *stream = (cudaStream_t) new Stream{flags, priority};
  return cudaSuccess;
}

API cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  delete stream_of(stream);
  return cudaSuccess;
}

API cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  *priority = stream_of(stream)->priority;
  return cudaSuccess;
}

API cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}

API cudaError_t cudaStreamQuery(cudaStream_t stream) {
  Lock lock(mutex);
  return check_waits_for(stream, "cudaStreamQuery");
}

API cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  Lock lock(mutex);
  return check_waits_for(stream, "cudaStreamSynchronize");
}

API cudaError_t cudaDeviceSynchronize() { return check_beside_captures("cudaDeviceSynchronize"); }

API cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t call, void* data, unsigned) {
  call(stream, cudaSuccess, data);
  return cudaSuccess;
}

API cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t call, void* data) {
  call(data);
  return cudaSuccess;
}

// Events

API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  *event = (cudaEvent_t) new Event{flags};
  return cudaSuccess;
}

API cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, cudaEventDefault); }

API cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event_of(event);
  return cudaSuccess;
}

API cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  Lock lock(mutex);
  if (cudaError_t error = check_stream(stream, "cudaEventRecord")) return error;
  Event* recorded = event_of(event);
  recorded->is_recorded = true;
  recorded->stream = stream_of(stream);
  recorded->capture = recorded->stream->capture ? recorded->stream->capture->number : 0;
  return cudaSuccess;
}

API cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return cudaEventRecordWithFlags(event, stream, 0);
}

static cudaError_t check_event(cudaEvent_t event, const char* what) {
  Lock lock(mutex);
  Capture* capture = capture_of(event_of(event));
  return capture ? broken(capture, cudaErrorCapturedEvent, what) : check_beside_captures(what);
}

API cudaError_t cudaEventQuery(cudaEvent_t event) { return check_event(event, "cudaEventQuery"); }

API cudaError_t cudaEventSynchronize(cudaEvent_t event) { return check_event(event, "cudaEventSynchronize"); }

API cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t begin, cudaEvent_t end) {
  for (const Event* event : {event_of(begin), event_of(end)}) {
    if (event->flags & cudaEventDisableTiming || !event->is_recorded) {
      return refused(cudaErrorInvalidResourceHandle, "cudaEventElapsedTime");
    }
  }
  *milliseconds = 1;
  return cudaSuccess;
}

API cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  Lock lock(mutex);
  if (cudaError_t error = check_stream(stream, "cudaStreamWaitEvent")) return error;
  Stream* waiting = stream_of(stream);
  Event* awaited = event_of(event);
  if (!awaited->is_recorded) return cudaSuccess;
  Capture* theirs = capture_of(awaited);
  Capture* own = waiting->capture;
  if (own && !theirs) return broken(own, cudaErrorStreamCaptureIsolation, "a wait for what no graph has");
  if (own && own != theirs) return broken(own, cudaErrorStreamCaptureMerge, "a wait for another capture");
  if (own) {
    own->unjoined.erase(awaited->stream);
  } else if (theirs) {
    if (waiting == &legacy) return broken(theirs, cudaErrorStreamCaptureImplicit, "a wait of the legacy stream");
    waiting->capture = theirs;
    theirs->streams.insert(waiting);
    theirs->unjoined.insert(waiting);
  }
  return cudaSuccess;
}

// Captures

API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, mode_of_thread);
  return cudaSuccess;
}

API cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  Lock lock(mutex);
  Stream* origin = stream_of(stream);
  if (origin == &legacy) return refused(cudaErrorStreamCaptureUnsupported, "a capture of the legacy stream");
  if (origin->capture) return refused(cudaErrorIllegalState, "a capture in a capture");
  origin->capture = new Capture{++captured, mode, origin};
  origin->capture->streams.insert(origin);
  captures.insert(origin->capture);
  return cudaSuccess;
}

API cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  Lock lock(mutex);
  Capture* capture = stream_of(stream)->capture;
  *graph = nullptr;
  if (capture == nullptr || capture->origin != stream_of(stream)) {
    return refused(cudaErrorStreamCaptureUnmatched, "cudaStreamEndCapture");
  }
  if (capture->mode != cudaStreamCaptureModeRelaxed && !pthread_equal(capture->thread, pthread_self())) {
    return refused(cudaErrorStreamCaptureWrongThread, "cudaStreamEndCapture");
  }
  for (Stream* each : capture->streams) each->capture = nullptr;
  captures.erase(capture);
  if (!capture->is_valid) return refused(cudaErrorStreamCaptureInvalidated, "cudaStreamEndCapture");
  if (!capture->unjoined.empty()) return refused(cudaErrorStreamCaptureUnjoined, "cudaStreamEndCapture");
  *graph = (cudaGraph_t)capture;
  return cudaSuccess;
}

API cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  Lock lock(mutex);
  if (cudaError_t error = check_stream(stream, "cudaStreamIsCapturing")) return error;
  Capture* capture = stream_of(stream)->capture;
  *status = capture == nullptr  ? cudaStreamCaptureStatusNone
            : capture->is_valid ? cudaStreamCaptureStatusActive
                                : cudaStreamCaptureStatusInvalidated;
  return cudaSuccess;
}

API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* id,
                                         cudaGraph_t* graph, const cudaGraphNode_t** nodes,
                                         const cudaGraphEdgeData** edges, size_t* count) {
  Lock lock(mutex);
  if (cudaError_t error = cudaStreamIsCapturing(stream, status)) return error;
  Capture* capture = stream_of(stream)->capture;
  if (id) *id = capture ? capture->number : 0;
  if (graph) *graph = (cudaGraph_t)capture;
  if (nodes) *nodes = nullptr;
  if (edges) *edges = nullptr;
  if (count) *count = 0;
  return cudaSuccess;
}

// Graphs

// Return the number of the capture that a stream is in, or 0.
API size_t emulator_capture(cudaStream_t stream) {
  Lock lock(mutex);
  Capture* capture = stream_of(stream)->capture;
  return capture ? capture->number : 0;
}

// Have somebody do what was captured, by the number of the capture.
API void emulator_on_replay(void (*call)(size_t)) { replay = call; }

API cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* made, cudaGraph_t graph, unsigned long long) {
  *made = (cudaGraphExec_t)graph;
  return cudaSuccess;
}

API cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream) {
  {
    Lock lock(mutex);
    if (Capture* capture = stream_of(stream)->capture) {
      return broken(capture, cudaErrorStreamCaptureUnsupported, "a graph in a graph");
    }
    if (cudaError_t error = check_stream(stream, "cudaGraphLaunch")) return error;
  }
  replay(((Capture*)graph)->number);
  return cudaSuccess;
}

API cudaError_t cudaGraphGetNodes(cudaGraph_t, cudaGraphNode_t*, size_t* count) {
  *count = 1;  // PyTorch asks whether there are any
  return cudaSuccess;
}

API cudaError_t cudaGraphDestroy(cudaGraph_t) { return cudaSuccess; }

API cudaError_t cudaGraphExecDestroy(cudaGraphExec_t) { return cudaSuccess; }
