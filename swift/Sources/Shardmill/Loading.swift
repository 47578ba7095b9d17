import Foundation
import ShardmillCoreML
import ShardmillDecode

extension ShardmillModel {
    /// Progress of loading.
    public struct Step: Sendable, Equatable {
        /// What is done to a part.
        public enum Work: String, Sendable {
            /// Core ML compiles its package: once for each version of the system.
            case compile
            /// The system makes code for its Neural Engine, which takes longest: once for each version of the system,
            /// and once after each update of the app.
            case specialise
            /// It is loaded.
            case load
            /// All parts are run once, since a load may push out another part's code. The part is the model.
            case run
        }

        /// What is done to the part.
        public let work: Work
        /// The part's name.
        public let part: String
        /// The part's place, from 1.
        public let place: Int
        /// The number of parts.
        public let of: Int
        /// The share of the whole of `prewarm` that is done, from 0 to 1. Times of kinds of work are not known before, so
        /// it may stand still, but it never goes back.
        public let fraction: Double
        /// An estimate for this kind of work from the parts so far; nil before the first is finished.
        public let secondsLeft: Double?
    }

    /// Load every program, and run it: the system specialises a program when it first runs.
    ///
    /// It takes minutes after an installation, and after each update of the system or the app; seconds otherwise.
    /// Cancelling the task that reads the stream stops it; what is finished stays.
    nonisolated public func prewarm() -> Streamed<Step> {
        streaming { emit in try await self.load(emit) }
    }

    private func load(_ progress: @Sendable (Step) -> Void) async throws { _ = try await ready(progress) }

    /// Return the sessions, after loading the programs if necessary.
    func ready(_ progress: @Sendable (Step) -> Void = { _ in }) async throws -> Sessions {
        let place = loading.join()
        defer { loading.leave(place) }
        try await loading.turn(place)
        let began = interrupt.began
        try check(began)
        if let sessions { return sessions }
        let bundles = try await compiled(progress)
        try check(began)
        try checkMemory(bundles)
        let backend = try makeBackend(bundles)
        if otherBackend == nil && !compiler.isWarm(manifest, bundles: bundles, units: units.rawValue) {
            let steps = Steps(.specialise, manifest.allParts.count)
            for (place, part) in manifest.allParts.enumerated() {
                progress(steps.next(part.name, place))
                try backend.specialise(part, widths: manifest.widths) { try self.check(began) }
            }
        }
        let steps = Steps(.load, manifest.parts.count)
        let shared = Shared(backend) { [checksMemory] in checksMemory ? Memory.available : nil }
        let engine = try Engine(manifest, backend: shared) { part, place in
            try self.check(began)
            progress(steps.next(part.name, place))
        }
        // With all parts loaded, since each load may push out another's code; widest first, so that the change from
        // prefill to decode is the last. The session that is made afterwards forgets what these passes wrote.
        let passes = Steps(.run, manifest.widths.count)
        for (place, width) in manifest.widths.reversed().enumerated() {
            try check(began)
            progress(passes.next(manifest.model, place))
            let places = Array(0..<width)
            _ = try engine.forward([Int](repeating: 0, count: width), slots: places, positions: places)
        }
        let sessions = try Sessions(engine, backend: shared, policy: context, most: conversations)
        if otherBackend == nil { try compiler.setWarm(manifest, bundles: bundles, units: units.rawValue) }
        self.sessions = sessions
        progress(passes.next(manifest.model, manifest.widths.count))
        return sessions
    }

    /// Throw if the work must end: it was cancelled, or the model is unloaded or paused.
    func check(_ began: Int) throws {
        try Task.checkCancellation()
        try interrupt.check(began)
    }

    private func compiled(_ progress: @Sendable (Step) -> Void) async throws -> [String: URL] {
        if otherBackend != nil { return [:] }
        let steps = Steps(.compile, manifest.allParts.count)
        return try await compiler.bundles(manifest) { part, place in
            try Task.checkCancellation()
            progress(steps.next(part.name, place))
        }
    }

    private func checkMemory(_ bundles: [String: URL]) throws {
        guard checksMemory, let available = Memory.available else { return }
        let needed = Memory.needed(manifest, bundles: bundles)
        if needed > available {
            let (needed, available) = (needed >> 20, available >> 20)
            throw ShardmillError(
                .memory,
                "\(manifest.model) takes about \(needed) MiB, and the system leaves the app \(available): "
                    + "free memory, take a smaller model or a shorter context, give the app the entitlement "
                    + "com.apple.developer.kernel.increased-memory-limit, or try with checksMemory: false")
        }
    }

    private func makeBackend(_ bundles: [String: URL]) throws -> any Backend {
        if let otherBackend { return try otherBackend(manifest, bundles) }
        #if canImport(ObjectiveC)
        return CoreMLBackend(
            bundles: bundles, manifest: manifest, units: units == .gpu ? .cpuAndGPU : .cpuAndNeuralEngine)
        #else
        throw ShardmillError(.program, "there is no Core ML on this system: give another back end")
        #endif
    }
}

/// Steps of one kind of work, with the time that is left.
private struct Steps: Sendable {
    /// Which share of the whole each kind of work is taken for: others report that specialising takes most of the time.
    private static let shares: [ShardmillModel.Step.Work: (from: Double, to: Double)] = [
        .compile: (0, 0.3), .specialise: (0.3, 0.8), .load: (0.8, 0.95), .run: (0.95, 1),
    ]
    private let work: ShardmillModel.Step.Work
    private let count: Int
    private let clock = ContinuousClock()
    private let start: ContinuousClock.Instant

    init(_ work: ShardmillModel.Step.Work, _ count: Int) {
        self.work = work
        self.count = count
        start = clock.now
    }

    /// Return the step with which the part at a place begins; at `count` all are finished.
    func next(_ part: String, _ place: Int) -> ShardmillModel.Step {
        let left = place == 0 ? nil : seconds(clock.now - start) / Double(place) * Double(count - place)
        let (from, to) = Self.shares[work] ?? (0, 1)
        let fraction = from + (to - from) * Double(place) / Double(max(1, count))
        return ShardmillModel.Step(
            work: work, part: part, place: min(place + 1, count), of: count, fraction: fraction, secondsLeft: left)
    }
}
