import Dispatch
import Foundation
import ShardmillCoreML
import ShardmillDecode
import ShardmillText

/// A build in an app: `let model = try ShardmillModel(at: folder)`, then `prewarm()`, then `chat()`.
///
/// Everything that touches programs runs on one thread of the model's own: a load may take minutes, and Core ML allows one
/// pass at a time.
public actor ShardmillModel {
    private let queue: QueueExecutor
    nonisolated public var unownedExecutor: UnownedSerialExecutor { queue.asUnownedSerialExecutor() }

    nonisolated public let manifest: Manifest
    nonisolated public let codec: any TextCodec
    private let compiler: Compiler
    private let makeBackend: @Sendable (Manifest, [String: URL]) throws -> any Backend
    private var session: Session?
    private var busy = false

    /// Open a build; nothing is loaded yet.
    ///
    /// - Parameters:
    ///   - folder: model.json and what it names.
    ///   - codec: a tokenizer in place of the package's own.
    ///   - cache: where bundles are kept that had to be compiled for this system; Application Support if left out.
    ///   - backend: what runs programs, in place of Core ML.
    /// - Throws: `ShardmillError` if the build can't be run by this version.
    public init(
        at folder: URL, codec: (any TextCodec)? = nil, cache: URL? = nil,
        backend: (@Sendable (Manifest, [String: URL]) throws -> any Backend)? = nil
    ) throws {
        manifest = try Manifest(folder: folder)
        self.codec = try codec ?? Tokenizer(manifest.tokenizer)
        compiler = Compiler(cache: cache)
        makeBackend = backend ?? { CoreMLBackend(bundles: $1, manifest: $0) }
        queue = QueueExecutor("shardmill.\(manifest.model)")
    }

    /// Progress of loading.
    public struct Step: Sendable, Equatable {
        public let part: String
        /// The part's place, from 1, and the number of parts.
        public let place: Int
        public let of: Int
        /// An estimate from the parts so far; nil before the first is loaded.
        public let secondsLeft: Double?
    }

    /// Load every program, and run each width once: the system specialises a program when it first runs.
    ///
    /// It takes minutes after an installation, and after each update of the system; seconds otherwise.
    nonisolated public func prewarm() -> AsyncThrowingStream<Step, any Error> {
        streaming { emit in try await self.load(emit) }
    }

    private func load(_ progress: @Sendable (Step) -> Void) async throws { _ = try await ready(progress) }

    /// Return the session, after loading the programs if necessary.
    private func ready(_ progress: @Sendable (Step) -> Void = { _ in }) async throws -> Session {
        while busy { try await Task.sleep(for: .milliseconds(20)) }  // an actor is re-entered at every await
        if let session { return session }
        busy = true
        defer { busy = false }
        let bundles = try await compiled(progress)
        let clock = ContinuousClock()
        let start = clock.now
        let count = manifest.parts.count
        let engine = try Engine(manifest, backend: try makeBackend(manifest, bundles)) { part, place in
            try Task.checkCancellation()
            let gone = Double((clock.now - start).components.seconds)
            let left = place == 0 ? nil : gone / Double(place) * Double(count - place)
            progress(Step(part: part.name, place: place + 1, of: count, secondsLeft: left))
        }
        for width in manifest.widths {
            try Task.checkCancellation()
            let places = Array(0..<width)
            _ = try engine.forward([Int](repeating: 0, count: width), slots: places, positions: places)
        }
        let session = try Session(engine)
        self.session = session
        return session
    }

    private func compiled(_ progress: @Sendable (Step) -> Void) async throws -> [String: URL] {
        #if canImport(ObjectiveC)
        let count = manifest.parts.count
        return try await compiler.bundles(manifest) { part, place in
            progress(Step(part: part.name, place: place + 1, of: count, secondsLeft: nil))
        }
        #else
        return [:]  // there is no Core ML to compile for
        #endif
    }

    /// Drop programs and states, for example on a memory warning. The next request loads them again.
    public func unload() {
        session = nil
    }

    /// Generate after a prompt of tokens, and call `emit` for each token; return how it ended.
    ///
    /// A prompt that begins as the text of the last request does is fed from where they differ. If the task is cancelled,
    /// the generation ends after the pass that is running, and the session keeps what it has.
    func generate(
        _ prompt: [Int], _ options: ShardmillOptions, stop: Set<Int>, emit: @Sendable (String) -> Void
    ) async throws -> GenerationSummary {
        let session = try await ready()
        var decoding = options.decoding
        if session.engine.manifest.margin > 0 { decoding.guardMargin = manifest.margin }
        let codec = codec
        let clock = ContinuousClock()
        let start = clock.now
        let generation = try Generation(session, prompt: prompt, options: decoding, drafter: options.drafter.make()) { _ in
            try Task.checkCancellation()
        }
        let prefilled = clock.now
        var text = try TextStream(stop: options.stop, prompt: prompt) { codec.decode($0, skipSpecialTokens: false) }
        var count = 0
        while let token = try generation.next() {
            count += 1
            if stop.contains(token.id) || manifest.eos.contains(token.id) {
                generation.stop()
                break
            }
            let piece = text.push(token.id)
            if !piece.isEmpty { emit(piece) }
            if text.stopped { generation.stop() }
            try Task.checkCancellation()
        }
        let tail = text.flush()
        if !tail.isEmpty { emit(tail) }
        let ended = generation.reason ?? .stop
        return GenerationSummary(
            reason: text.stopped ? .stop : ended, promptTokens: prompt.count, promptTokensReused: generation.reusedTokens,
            tokens: count, passes: generation.passes, drafted: generation.drafted, accepted: generation.accepted,
            prefillSeconds: seconds(prefilled - start), decodeSeconds: seconds(clock.now - prefilled))
    }
}

/// How a text is generated.
public struct ShardmillOptions: Sendable {
    /// Where drafts come from. They affect speed, never the text.
    public enum Drafting: Sendable {
        case none, ngram, suffix

        func make() -> (any Drafter)? {
            switch self {
            case .none: nil
            case .ngram: NgramDrafter()
            case .suffix: SuffixDrafter()
            }
        }
    }

    public var maxTokens = 512
    public var sampling = Sampling()
    public var stop: [String] = []
    public var drafter = Drafting.suffix

    public init(maxTokens: Int = 512, temperature: Double = 0, stop: [String] = []) {
        self.maxTokens = maxTokens
        self.stop = stop
        sampling.temperature = temperature
    }

    var decoding: Options { Options(maxTokens: maxTokens, sampling: sampling) }
}

/// How a generation ended, and what it took.
public struct GenerationSummary: Sendable, Equatable {
    public let reason: FinishReason
    public let promptTokens: Int
    /// Prompt tokens that were in the cache already.
    public let promptTokensReused: Int
    public let tokens: Int
    public let passes: Int
    public let drafted: Int
    public let accepted: Int
    public let prefillSeconds: Double
    public let decodeSeconds: Double

    public var tokensPerSecond: Double { decodeSeconds > 0 ? Double(max(0, tokens - 1)) / decodeSeconds : 0 }
}

/// Return a stream of what `work` emits. If its reader stops or is cancelled, the work is cancelled.
func streaming<Element: Sendable>(
    _ work: @escaping @Sendable (@escaping @Sendable (Element) -> Void) async throws -> Void
) -> AsyncThrowingStream<Element, any Error> {
    AsyncThrowingStream { stream in
        let task = Task {
            do {
                try await work { stream.yield($0) }
                stream.finish()
            } catch {
                stream.finish(throwing: error)
            }
        }
        stream.onTermination = { _ in task.cancel() }
    }
}

func seconds(_ duration: Duration) -> Double {
    Double(duration.components.seconds) + Double(duration.components.attoseconds) * 1e-18
}

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
