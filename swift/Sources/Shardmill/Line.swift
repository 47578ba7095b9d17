import Synchronization

/// Who waits for something that one may have at a time, in the order in which they came.
///
/// An actor is re-entered at every await, and its callers reach it in any order: so a place is taken where a request is
/// made, and given back when its work has ended.
final class Line: Sendable {
    private struct State {
        var next = 0
        var places: [Int] = []
        var turns: [Int: CheckedContinuation<Void, any Error>] = [:]
    }

    private let state = Mutex(State())

    /// Whether nobody waits or works.
    var isEmpty: Bool { state.withLock { $0.places.isEmpty } }

    /// Take the last place.
    func join() -> Int {
        state.withLock { state in
            state.next += 1
            state.places.append(state.next)
            return state.next
        }
    }

    /// Wait until everybody before a place has left.
    ///
    /// - Throws: `CancellationError` if the task is cancelled; the place has to be given back all the same.
    func turn(_ place: Int, isolation: isolated (any Actor)? = #isolation) async throws {
        try await withTaskCancellationHandler {
            try await withCheckedThrowingContinuation { (turn: CheckedContinuation<Void, any Error>) in
                let known: Result<Void, any Error>? = state.withLock { state in
                    if Task.isCancelled { return .failure(CancellationError()) }
                    if state.places.first == place { return .success(()) }
                    state.turns[place] = turn
                    return nil
                }
                if let known { turn.resume(with: known) }
            }
        } onCancel: {
            state.withLock { $0.turns.removeValue(forKey: place) }?.resume(throwing: CancellationError())
        }
    }

    /// Give a place back.
    func leave(_ place: Int) {
        state.withLock { state -> CheckedContinuation<Void, any Error>? in
            state.places.removeAll { $0 == place }
            return state.places.first.flatMap { state.turns.removeValue(forKey: $0) }
        }?.resume()
    }
}
