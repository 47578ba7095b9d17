import Foundation
import ShardmillCoreML
import ShardmillDecode
import ShardmillText

// What an app names beside this module's own types.
@_exported import enum ShardmillDecode.AnswerPiece
@_exported import struct ShardmillDecode.ChatFormat
@_exported import struct ShardmillDecode.CheckedPart
@_exported import enum ShardmillDecode.ContextPolicy
@_exported import struct ShardmillDecode.EncoderManifest
@_exported import enum ShardmillDecode.FinishReason
@_exported import struct ShardmillDecode.FunctionCall
@_exported import struct ShardmillDecode.Labelled
@_exported import struct ShardmillDecode.Manifest
@_exported import struct ShardmillDecode.Sampling
@_exported import struct ShardmillDecode.ShardmillError
@_exported import struct ShardmillDecode.Span
@_exported import protocol ShardmillText.TextCodec

/// A build in an app: `let model = try ShardmillModel(at: folder)`, then `prewarm()`, then `chat()`.
///
/// Everything that touches programs runs on one thread of the model's own: a load may take minutes, and Core ML allows
/// one pass at a time.
public actor ShardmillModel {
    private let queue: QueueExecutor
    /// The thread that everything of the model runs on.
    nonisolated public var unownedExecutor: UnownedSerialExecutor { queue.asUnownedSerialExecutor() }

    /// The build's model.json.
    nonisolated public let manifest: Manifest
    /// What turns text into tokens and back.
    nonisolated public let codec: any TextCodec
    let compiler: Compiler
    let units: Units
    let checksMemory: Bool
    /// What runs programs in place of Core ML.
    let otherBackend: (@Sendable (Manifest, [String: URL]) throws -> any Backend)?
    let interrupt = Interrupt()
    let context: ContextPolicy
    let conversations: Int
    var sessions: Sessions?
    let loading = Line()

    /// Where programs may run.
    public enum Units: String, Sendable {
        /// On the Neural Engine, and on the CPU where the Neural Engine can't.
        case neuralEngine
        /// On the GPU and the CPU: for a device whose Neural Engine refuses a program.
        case gpu
    }

    /// Open a build; nothing is loaded yet.
    ///
    /// - Parameters:
    ///   - folder: model.json and what it names.
    ///   - codec: a tokenizer in place of the package's own.
    ///   - cache: where bundles are kept that had to be compiled for this system; Application Support if left out.
    ///   - units: where programs may run. The package never changes it by itself.
    ///   - checksMemory: whether to refuse a model that takes more memory than the system leaves the app.
    ///   - loadsHead: whether to load the build's head, MTP layer or assistant, if there is one, which `Drafting.head`
    ///     needs.
    ///   - context: what happens when a conversation is longer than the context: it ends, or it slides, that is the
    ///     model no longer sees the oldest tokens but the first few.
    ///   - conversations: how many conversations keep their caches while others are answered, where memory allows. Each
    ///     takes the memory of its states; one beyond them is fed again from its beginning.
    /// - Throws: `ShardmillError` if the build can't be run by this version.
    public init(
        at folder: URL, codec: (any TextCodec)? = nil, cache: URL? = nil, units: Units = .neuralEngine,
        checksMemory: Bool = true, loadsHead: Bool = false, context: ContextPolicy = .stop, conversations: Int = 2
    ) throws {
        try self.init(
            at: folder, codec: codec, cache: cache, units: units, checksMemory: checksMemory, loadsHead: loadsHead,
            context: context, conversations: conversations, backend: nil)
    }

    /// Open a build whose programs are run by a back end, in place of Core ML.
    package init(
        at folder: URL, codec: (any TextCodec)? = nil, cache: URL? = nil, units: Units = .neuralEngine,
        checksMemory: Bool = true, loadsHead: Bool = false, context: ContextPolicy = .stop, conversations: Int = 2,
        backend: (@Sendable (Manifest, [String: URL]) throws -> any Backend)?
    ) throws {
        let whole = try Manifest(folder: folder)
        manifest = loadsHead ? whole : whole.withoutDrafter
        self.codec = try codec ?? Tokenizer(manifest.tokenizer)
        compiler = Compiler(cache: cache)
        self.units = units
        self.checksMemory = checksMemory
        self.context = context
        self.conversations = conversations
        otherBackend = backend
        queue = QueueExecutor("shardmill.\(manifest.model)")
    }

    /// Drop programs and states, for example on a memory warning. The next request loads them again.
    ///
    /// What the model is working at ends after the pass that is running, with an error of the kind `interrupted`.
    nonisolated public func unload() async {
        interrupt.stopAll()
        await drop()
    }

    private func drop() { sessions = nil }

    /// Let other conversations have the cache of one that has ended.
    nonisolated func forget(_ chat: ObjectIdentifier) { Task { await free(chat) } }

    private func free(_ chat: ObjectIdentifier) { sessions?.free(.chat(chat)) }

    /// Refuse to run programs until `resume()`: for an app that goes to the background.
    ///
    /// From iOS 27 on, an app in the background gets the Neural Engine only with the entitlement
    /// `com.apple.developer.background-tasks.continued-processing.inference`. What the model is working at ends after
    /// the pass that is running, with an error of the kind `interrupted`; programs and states stay loaded.
    nonisolated public func pause() { interrupt.isPaused = true }

    /// Compare the programs with the results that the build carries, as `shardmill check` does: in some seconds.
    ///
    /// - Returns: whether the model runs rightly on this device, with what was found of each part, for an app to show.
    /// - Throws: `ShardmillError` of kind `build` if the build was made before there were such results, and what
    ///   `prewarm` throws.
    public func check(precision: String = "fp16") async throws -> Verdict {
        guard let file = manifest.expected else {
            throw ShardmillError(.build, "\(manifest.model) has no expected results: it was built before there were any")
        }
        let expected = try Expected(file)
        let began = interrupt.began
        let sessions = try await ready()
        let clock = ContinuousClock()
        let start = clock.now
        let parts = try sessions.check(expected, precision: precision) { try self.check(began) }
        return Verdict(parts: parts, seconds: seconds(clock.now - start))
    }

    /// Run programs again after `pause()`.
    nonisolated public func resume() { interrupt.isPaused = false }

    /// Generate after a prompt of tokens, and call `emit` for each token; return how it ended.
    ///
    /// A prompt that begins as the text of the last request does is fed from where they differ. If the task is
    /// cancelled, the generation ends after the pass that is running, and the session keeps what it has.
    func generate(
        _ prompt: [Int], _ options: ShardmillOptions, stop: Set<Int>, for chat: ObjectIdentifier? = nil,
        emit: @Sendable (Piece) -> Void
    ) async throws -> GenerationSummary {
        let began = interrupt.began
        let sessions = try await ready()
        let drafter = try options.drafter.make(sessions.head)
        let drafts = options.drafter == .head
        let session = try sessions.session(for: chat.map { .chat($0) } ?? .everybody, drafts: drafts)
        var decoding = options.decoding
        if session.engine.manifest.margin > 0 { decoding.guardMargin = manifest.margin }
        let codec = codec
        let clock = ContinuousClock()
        let start = clock.now
        try session.useAdapter(options.adapter)
        let generation = try Generation(session, prompt: prompt, options: decoding, drafter: drafter) { _ in
            try self.check(began)
        }
        let prefilled = clock.now
        var text = try TextStream(stop: options.stop, prompt: prompt) { codec.decode($0, skipSpecialTokens: false) }
        var (count, emitted) = (0, 0)
        func send(_ text: String) {
            if text.isEmpty { return }
            emit(Piece(text: text, tokens: count - emitted))
            emitted = count
        }
        while let token = try generation.next() {
            count += 1
            if stop.contains(token.id) || manifest.eos.contains(token.id) {
                generation.stop()
                break
            }
            send(text.push(token.id))
            if text.stopped { generation.stop() }
            try check(began)
        }
        send(text.flush())
        let ended = generation.reason ?? .stop
        return GenerationSummary(
            reason: text.stopped ? .stop : ended, promptTokens: prompt.count,
            promptTokensReused: generation.reusedTokens,
            tokens: count, passes: generation.passes, drafted: generation.drafted, accepted: generation.accepted,
            prefillSeconds: seconds(prefilled - start), decodeSeconds: seconds(clock.now - prefilled))
    }
}

/// What a check of a model on this device found.
public struct Verdict: Sendable {
    /// What was found of each part, and of the first answer.
    public let parts: [CheckedPart]
    /// How long it took.
    public let seconds: Double

    /// Whether no part is wrong.
    public var isRight: Bool { parts.allSatisfy(\.isRight) }
    /// One line for people.
    public var summary: String {
        let wrong = parts.filter { !$0.isRight }.map(\.name)
        let compared = parts.filter { $0.limit != nil }.count
        return wrong.isEmpty
            ? "right on this device: \(compared) of \(parts.count) compared"
            : "wrong on this device: \(wrong.joined(separator: ", "))"
    }
}

/// Some of an answer's text, and the number of tokens that it came from.
struct Piece: Sendable {
    let text: String
    let tokens: Int
}

/// How a text is generated.
public struct ShardmillOptions: Sendable {
    /// Where drafts come from. They affect speed, never the text.
    public enum Drafting: Sendable {
        /// There are no drafts.
        case none
        /// From earlier places of the last tokens.
        case ngram
        /// From the longest earlier text that ends in the same way.
        case suffix
        /// From the build's own head, MTP layer or assistant, if the model was opened with `loadsHead`.
        case head

        func make(_ head: (any Drafter)?) throws -> (any Drafter)? {
            switch self {
            case .none: return nil
            case .ngram: return NgramDrafter()
            case .suffix: return SuffixDrafter()
            case .head:
                guard let head else {
                    throw ShardmillError(.request, "no head is loaded: open a build that has one with loadsHead: true")
                }
                return head
            }
        }
    }

    /// The most tokens of an answer.
    public var maxTokens = 512
    /// Temperature, seed and filters; greedy if the temperature is 0.
    public var sampling = Sampling()
    /// Texts before which an answer ends.
    public var stop: [String] = []
    /// Where drafts come from.
    public var drafter = Drafting.suffix
    /// The name of an adapter of the build to compute with, one of `manifest.adapterNames`; nil for the bare model.
    public var adapter: String?

    /// Choose how much to generate, and how.
    public init(maxTokens: Int = 512, temperature: Double = 0, stop: [String] = []) {
        self.maxTokens = maxTokens
        self.stop = stop
        sampling.temperature = temperature
    }

    var decoding: Options { Options(maxTokens: maxTokens, sampling: sampling) }
}

/// How a generation ended, and what it took.
public struct GenerationSummary: Sendable, Equatable {
    /// Why it ended.
    public let reason: FinishReason
    /// Tokens of the prompt, the conversation so far included.
    public let promptTokens: Int
    /// Prompt tokens that were in the cache already.
    public let promptTokensReused: Int
    /// Generated tokens.
    public let tokens: Int
    /// Decode passes.
    public let passes: Int
    /// Drafted tokens that passes had.
    public let drafted: Int
    /// Drafted tokens that were right.
    public let accepted: Int
    /// Seconds until the first token.
    public let prefillSeconds: Double
    /// Seconds from the first token on.
    public let decodeSeconds: Double

    /// Generated tokens per second, without the first.
    public var tokensPerSecond: Double { decodeSeconds > 0 ? Double(max(0, tokens - 1)) / decodeSeconds : 0 }
}

/// What comes piece by piece, to be read once. Where a task that reads it is cancelled, reading throws a
/// `CancellationError`: a stream of Swift's own would end as if it were finished.
public struct Streamed<Element: Sendable>: AsyncSequence, Sendable {
    let pieces: AsyncThrowingStream<Element, any Error>

    /// What reads the pieces.
    public struct AsyncIterator: AsyncIteratorProtocol {
        var pieces: AsyncThrowingStream<Element, any Error>.Iterator

        /// Return the next piece; nil at the end.
        public mutating func next() async throws -> Element? {
            if let piece = try await pieces.next() { return piece }
            try Task.checkCancellation()
            return nil
        }
    }

    /// Begin to read.
    public func makeAsyncIterator() -> AsyncIterator { AsyncIterator(pieces: pieces.makeAsyncIterator()) }
}

/// Return a stream of what `work` emits. If its reader stops or is cancelled, the work is cancelled.
func streaming<Element: Sendable>(
    _ work: @escaping @Sendable (@escaping @Sendable (Element) -> Void) async throws -> Void
) -> Streamed<Element> {
    let pieces = AsyncThrowingStream<Element, any Error> { stream in
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
    return Streamed(pieces: pieces)
}

func seconds(_ duration: Duration) -> Double {
    Double(duration.components.seconds) + Double(duration.components.attoseconds) * 1e-18
}
