import Dispatch
import ShardmillDecode
import Synchronization

/// A serial executor on a dispatch queue: passes block a thread of their own, not one of Swift's few.
final class QueueExecutor: SerialExecutor {
    private let queue: DispatchQueue

    init(_ label: String) { queue = DispatchQueue(label: label, qos: .userInitiated) }

    func enqueue(_ job: consuming ExecutorJob) {
        let job = UnownedJob(job)
        let executor = asUnownedSerialExecutor()
        queue.async { job.runSynchronously(on: executor) }
    }

    func asUnownedSerialExecutor() -> UnownedSerialExecutor { UnownedSerialExecutor(ordinary: self) }
}

/// What other threads tell a model that is working: its own thread is busy until the work ends.
final class Interrupt: Sendable {
    private struct State {
        var stops = 0
        var isPaused = false
    }

    private let state = Mutex(State())

    /// A mark of now: `check` throws if everything is stopped after it.
    var began: Int { state.withLock { $0.stops } }

    var isPaused: Bool {
        get { state.withLock { $0.isPaused } }
        set { state.withLock { $0.isPaused = newValue } }
    }

    func stopAll() { state.withLock { $0.stops += 1 } }

    /// Throw if work that began at `began` must end.
    func check(_ began: Int) throws {
        let now = state.withLock { $0 }
        if now.isPaused { throw ShardmillError(.interrupted, "the model is paused, as the app is in the background") }
        if now.stops != began {
            throw ShardmillError(.interrupted, "the model was unloaded; the next request loads it again")
        }
    }
}
