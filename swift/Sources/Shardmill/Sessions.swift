import Foundation
import ShardmillCoreML
import ShardmillDecode

/// Who uses a session.
enum Owner: Equatable {
    /// Requests without a conversation of the package's own.
    case everybody
    /// A conversation.
    case chat(ObjectIdentifier)
    /// Nobody any longer.
    case nobody
}

/// The programs of a model, and the sessions that run them, each with states of its own.
///
/// Conversations with sessions of their own keep their caches while others are answered. A session takes the memory of
/// its states; the programs are loaded once.
final class Sessions {
    private let backend: Shared
    private let manifest: Manifest
    private let policy: ContextPolicy
    private let most: Int
    /// The last one that was used is the last.
    private var sessions: [(owner: Owner, session: Session)]
    /// What drafts from the hidden states of the first session; nil if nothing does.
    let head: (any Drafter)?
    private let first: Session

    /// - Parameters:
    ///   - engine: the loaded programs; the first session runs it.
    ///   - backend: what loaded them.
    ///   - policy: what happens when the slots are used up.
    ///   - most: the number of sessions at most.
    init(_ engine: Engine, backend: Shared, policy: ContextPolicy, most: Int) throws {
        (manifest, self.backend, self.policy, self.most) = (engine.manifest, backend, policy, max(1, most))
        first = try Session(engine, contextPolicy: policy)
        sessions = [(.nobody, first)]
        head = manifest.drafter == nil ? nil : try loadDrafter(first, backend: backend)
    }

    /// How many sessions there are.
    var count: Int { sessions.count }

    /// Return a session for a request: its owner's, else a new one, else the one that was not used for longest.
    ///
    /// - Parameters:
    ///   - owner: who asks.
    ///   - drafts: whether the head drafts, which reads the first session.
    func session(for owner: Owner, drafts: Bool) throws -> Session {
        var place = drafts ? sessions.firstIndex { $0.session === first } : sessions.firstIndex { $0.owner == owner }
        place = place ?? sessions.firstIndex { $0.owner == .nobody }
        if place == nil && sessions.count < most && hasRoom {
            let session = try Session(Engine(manifest, backend: backend), contextPolicy: policy)
            sessions.append((owner, session))
            place = sessions.count - 1
        }
        let found = sessions.remove(at: place ?? 0)
        sessions.append((owner, found.session))
        return found.session
    }

    /// Compare the programs with what the build expects; the first session's text is forgotten.
    ///
    /// - Parameter check: called after each part; it may throw to stop.
    func check(_ expected: Expected, precision: String, check: () throws -> Void) throws -> [CheckedPart] {
        var found: [CheckedPart] = []
        try first.useAdapter(nil)
        _ = try first.truncate(0)
        defer { _ = try? first.truncate(0) }
        try first.engine.check(expected, precision: precision) { part in
            found.append(part)
            try check()
        }
        return found
    }

    /// Let others use a session.
    func free(_ owner: Owner) {
        for place in sessions.indices where sessions[place].owner == owner { sessions[place].owner = .nobody }
    }

    private var hasRoom: Bool { Memory.available.map { $0 > 2 * Memory.states(manifest) } ?? true }
}

/// A back end that loads each function once, for all that use it, while the system leaves the app memory for it.
///
/// Functions of a part share its weights in a build. Others report that each takes memory of its own when loaded; so what
/// one took is asked of the system before the next is loaded, and the app gets an error before the system ends it.
package final class Shared: Backend {
    private let backend: any Backend
    private let available: () -> Int?
    private var loaded: [String: any LoadedFunction] = [:]
    private var taken: [String: Int] = [:]  // what the last function of a part took, in bytes

    /// - Parameters:
    ///   - backend: what loads functions.
    ///   - available: bytes that the app may still take; nil if nothing limits them.
    package init(_ backend: any Backend, available: @escaping () -> Int?) {
        (self.backend, self.available) = (backend, available)
    }

    package func load(_ part: Part, function: String) throws -> any LoadedFunction {
        let key = "\(part.name) \(function)"
        if let found = loaded[key] { return found }
        let before = available()
        if let before, let need = taken[part.name], need > before {
            throw ShardmillError(
                .memory,
                "\(part.name): a function took \(need >> 20) MiB, and the system leaves the app \(before >> 20) for the "
                    + "next, \(function): take a build with fewer `contexts` or of flexible shapes, or a smaller model")
        }
        let made = try backend.load(part, function: function)
        if let before, let after = available() { taken[part.name] = max(0, before - after) }
        loaded[key] = made
        return made
    }
}
