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
        }

        /// What is done to the part.
        public let work: Work
        /// The part's name.
        public let part: String
        /// The part's place, from 1.
        public let place: Int
        /// The number of parts.
        public let of: Int
        /// An estimate from the parts so far; nil before the first is finished.
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

    /// Return the session, after loading the programs if necessary.
    func ready(_ progress: @Sendable (Step) -> Void = { _ in }) async throws -> Session {
        let place = loading.join()
        defer { loading.leave(place) }
        try await loading.turn(place)
        let began = interrupt.began
        try check(began)
        if let session { return session }
        let bundles = try await compiled(progress)
        try check(began)
        try checkMemory(bundles)
        let backend = try makeBackend(bundles)
        if otherBackend == nil && !compiler.isWarm(manifest, bundles: bundles, units: units.rawValue) {
            var steps = Steps(.specialise, manifest.allParts.count)
            for (place, part) in manifest.allParts.enumerated() {
                progress(steps.next(part, place))
                try backend.specialise(part, widths: manifest.widths) { try self.check(began) }
            }
        }
        var steps = Steps(.load, manifest.parts.count)
        let engine = try Engine(manifest, backend: backend) { part, place in
            try self.check(began)
            progress(steps.next(part, place))
        }
        // With all parts loaded, since each load may push out another's code; widest first, so that the change from
        // prefill to decode is the last. The session that is made afterwards forgets what these passes wrote.
        for width in manifest.widths.reversed() {
            try check(began)
            let places = Array(0..<width)
            _ = try engine.forward([Int](repeating: 0, count: width), slots: places, positions: places)
        }
        let session = try Session(engine)
        head = manifest.drafter == nil ? nil : try loadDrafter(session, backend: backend)
        if otherBackend == nil { try compiler.setWarm(manifest, bundles: bundles, units: units.rawValue) }
        self.session = session
        return session
    }

    /// Throw if the work must end: it was cancelled, or the model is unloaded or paused.
    func check(_ began: Int) throws {
        try Task.checkCancellation()
        try interrupt.check(began)
    }

    private func compiled(_ progress: @Sendable (Step) -> Void) async throws -> [String: URL] {
        if otherBackend != nil { return [:] }
        let count = manifest.allParts.count
        return try await compiler.bundles(manifest) { part, place in
            try Task.checkCancellation()
            progress(Step(work: .compile, part: part.name, place: place + 1, of: count, secondsLeft: nil))
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
private struct Steps {
    private let work: ShardmillModel.Step.Work
    private let count: Int
    private let clock = ContinuousClock()
    private let start: ContinuousClock.Instant

    init(_ work: ShardmillModel.Step.Work, _ count: Int) {
        self.work = work
        self.count = count
        start = clock.now
    }

    mutating func next(_ part: Part, _ place: Int) -> ShardmillModel.Step {
        let left = place == 0 ? nil : seconds(clock.now - start) / Double(place) * Double(count - place)
        return ShardmillModel.Step(work: work, part: part.name, place: place + 1, of: count, secondsLeft: left)
    }
}
