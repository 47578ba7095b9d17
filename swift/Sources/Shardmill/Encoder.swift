import Foundation
import ShardmillCoreML
import ShardmillDecode
import ShardmillText

/// An encoder's build in an app: `let model = try ShardmillEncoder(at: folder)`, then `label`, `classify` or `embed`.
public actor ShardmillEncoder {
    private let queue: QueueExecutor
    /// The thread that everything of the model runs on.
    nonisolated public var unownedExecutor: UnownedSerialExecutor { queue.asUnownedSerialExecutor() }

    /// The build's model.json.
    nonisolated public let manifest: EncoderManifest
    private let tokenizer: Tokenizer
    private let units: ShardmillModel.Units
    private let otherBackend: (@Sendable (EncoderManifest) throws -> any Backend)?
    private let compiler: Compiler
    private var reader: Reader?
    private let loading = Line()

    /// Open a build; nothing is loaded yet.
    ///
    /// - Parameters:
    ///   - folder: model.json and what it names.
    ///   - cache: where bundles are kept that had to be compiled for this system; Application Support if left out.
    ///   - units: where programs may run.
    /// - Throws: `ShardmillError` if the build can't be run by this version.
    public init(at folder: URL, cache: URL? = nil, units: ShardmillModel.Units = .neuralEngine) throws {
        try self.init(at: folder, cache: cache, units: units, backend: nil)
    }

    /// Open a build whose programs are run by a back end, in place of Core ML.
    package init(
        at folder: URL, cache: URL? = nil, units: ShardmillModel.Units = .neuralEngine,
        backend: (@Sendable (EncoderManifest) throws -> any Backend)?
    ) throws {
        manifest = try EncoderManifest(folder: folder)
        tokenizer = try Tokenizer(manifest.tokenizer)
        self.units = units
        compiler = Compiler(cache: cache)
        otherBackend = backend
        queue = QueueExecutor("shardmill.\(manifest.model)")
    }

    /// Load every program: minutes after an installation or an update of the system, seconds otherwise.
    public func prewarm() async throws { _ = try await ready() }

    /// Drop the programs. The next request loads them again.
    public func unload() { reader = nil }

    /// Return the spans of texts of any length.
    public func label(_ texts: [String]) async throws -> [Labelled] {
        let read = try texts.map { text in
            let found = try tokenizer.encodeWithOffsets(text)
            return ReadText(ids: found.ids, offsets: found.offsets, inside: found.inside)
        }
        return try await ready().label(read) { try Task.checkCancellation() }
    }

    /// Return the share of each label for texts that each fit into a pass, the likeliest first.
    public func classify(_ texts: [String]) async throws -> [[(label: String, share: Double)]] {
        try await ready().classify(texts.map { try tokenizer.encode($0) }) { try Task.checkCancellation() }
    }

    /// Return the embeddings of texts that each fit into a pass, each of length 1.
    public func embed(_ texts: [String]) async throws -> [[Float]] {
        try await ready().embed(texts.map { try tokenizer.encode($0) }) { try Task.checkCancellation() }
    }

    private func ready() async throws -> Reader {
        let place = loading.join()
        defer { loading.leave(place) }
        try await loading.turn(place)
        if let reader { return reader }
        let backend = try await makeBackend()
        let made = try Reader(try Encoder(manifest, backend: backend) { _, _ in try Task.checkCancellation() })
        reader = made
        return made
    }

    private func makeBackend() async throws -> any Backend {
        if let otherBackend { return try otherBackend(manifest) }
        #if canImport(ObjectiveC)
        let bundles = try await compiler.bundles(manifest)
        return CoreMLBackend(bundles: bundles, units: units == .gpu ? .cpuAndGPU : .cpuAndNeuralEngine)
        #else
        throw ShardmillError(.program, "there is no Core ML on this system: give another back end")
        #endif
    }
}

extension Span {
    /// Return the span's piece of the text that it was found in.
    public func text(in text: String) -> String {
        let scalars = text.unicodeScalars
        let start = scalars.index(scalars.startIndex, offsetBy: range.lowerBound, limitedBy: scalars.endIndex)
        guard let start, let end = scalars.index(start, offsetBy: range.count, limitedBy: scalars.endIndex) else {
            return ""
        }
        return String(scalars[start..<end])
    }
}
