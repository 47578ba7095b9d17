import Foundation
import ShardmillDecode

/// Return the processor's seconds that this thread has taken: other programs of a busy machine don't count.
func cpuSeconds() -> Double {
    var time = timespec()
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time)
    return Double(time.tv_sec) + Double(time.tv_nsec) * 1e-9
}

/// A back end that adds up the processor's time that this thread takes in another one's programs.
final class Stopwatch: Backend {
    /// Seconds in programs so far.
    private(set) var seconds = 0.0
    private let backend: any Backend

    init(_ backend: any Backend) { self.backend = backend }

    func load(_ part: Part, function: String) throws -> any LoadedFunction {
        Timed(try backend.load(part, function: function), self)
    }

    private func timed<Value>(_ work: () throws -> Value) rethrows -> Value {
        let start = cpuSeconds()
        defer { seconds += cpuSeconds() - start }
        return try work()
    }

    private final class Timed: LoadedFunction {
        private let function: any LoadedFunction
        private let watch: Stopwatch

        init(_ function: any LoadedFunction, _ watch: Stopwatch) {
            self.function = function
            self.watch = watch
        }

        func makeState() throws -> any ProgramState { try function.makeState() }

        func makeBuffer(_ input: String, shape: [Int]) throws -> any Buffer {
            try function.makeBuffer(input, shape: shape)
        }

        func run(_ inputs: [String: any Buffer], state: (any ProgramState)?) throws -> [String: any Buffer] {
            try watch.timed { try function.run(inputs, state: state) }
        }
    }
}

/// A back end whose programs return at once: zeros, and the same logits for every token.
final class IdleBackend: Backend {
    private let logits: [Float]
    private let channels: Int

    /// - Parameter logits: [V] in raw fp32.
    init(_ manifest: Manifest, logits: Data) throws {
        guard logits.count == 4 * manifest.vocab else {
            throw ShardmillError(.request, "the file of logits has \(logits.count) bytes: give \(4 * manifest.vocab)")
        }
        self.logits = [Float](unsafeUninitializedCapacity: manifest.vocab) { into, count in
            count = logits.copyBytes(to: UnsafeMutableRawBufferPointer(into)) / 4
        }
        guard case .fixed(let channels)? = manifest.parts.first?.inputs["x"]?[1] else {
            throw ShardmillError(.build, "the first part has no x")
        }
        self.channels = channels
    }

    func load(_ part: Part, function: String) throws -> any LoadedFunction {
        if !part.written.isEmpty || part.kind == .experts {
            throw ShardmillError(.request, "\(part.name): programs with host caches or routed experts can't be idle")
        }
        return Idle(part.kind == .head ? Array(logits[part.start..<part.end]) : [Float](repeating: 0, count: channels))
    }

    private final class Idle: LoadedFunction {
        private let column: [Float]
        private var outputs: [Int: HostBuffer] = [:]

        init(_ column: [Float]) { self.column = column }

        func makeState() throws -> any ProgramState { NoState() }

        func makeBuffer(_ input: String, shape: [Int]) throws -> any Buffer { HostBuffer(HostArray(zeros: shape)) }

        func run(_ inputs: [String: any Buffer], state: (any ProgramState)?) throws -> [String: any Buffer] {
            guard let tokens = (inputs["x"] ?? inputs["hidden"])?.shape[2] else {
                throw ShardmillError(.program, "a program has neither x nor hidden")
            }
            if let known = outputs[tokens] { return ["output": known] }
            let values = column.flatMap { [Float](repeating: $0, count: tokens) }
            let made = HostBuffer(HostArray(shape: [1, column.count, tokens, 1], values: values))
            outputs[tokens] = made
            return ["output": made]
        }
    }

    private final class NoState: ProgramState {
        func read(_ name: String) throws -> HostArray { throw ShardmillError(.program, "there is no state \(name)") }

        func write(_ name: String, _ array: HostArray) throws {
            throw ShardmillError(.program, "there is no state \(name)")
        }
    }
}
