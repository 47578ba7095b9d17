import Foundation
import ShardmillDecode
import Synchronization

#if canImport(FoundationNetworking)
import FoundationNetworking
#endif

/// Where a build is downloaded from.
struct Source: Sendable {
    private let base: URL
    private let headers: [String: String]

    init(_ base: URL, _ headers: [String: String]) throws {
        let isHere = ["127.0.0.1", "localhost", "::1"].contains(base.host ?? "")
        guard base.scheme == "https" || base.scheme == "http" && isHere else {
            throw ShardmillError(.request, "\(base.absoluteString.prefix(100)) is no https address")
        }
        (self.base, self.headers) = (base, headers)
    }

    /// Return a small file.
    func data(_ path: String) async throws -> Data {
        let found = Gathered()
        try await get(path, from: 0) { piece, _ in
            if found.add(piece) > 1 << 26 { throw ShardmillError(.build, "\(path) is too large") }
        }
        return found.all
    }

    /// Append what a file lacks. A server that does not know ranges sends all of it.
    func append(_ path: String, to target: Target) async throws {
        try await get(path, from: target.held()) { piece, isRest in try target.write(piece, isRest: isRest) }
    }

    /// Ask for a file from a byte on, and call `take` with each piece and whether it belongs to the rest only.
    private func get(
        _ path: String, from start: UInt64, take: @escaping @Sendable (Data, Bool) throws -> Void
    ) async throws {
        var request = URLRequest(url: base.appendingPathComponent(path))
        for (name, value) in headers { request.setValue(value, forHTTPHeaderField: name) }
        request.setValue("identity", forHTTPHeaderField: "Accept-Encoding")
        if start > 0 { request.setValue("bytes=\(start)-", forHTTPHeaderField: "Range") }
        let reader = Reader(path: path, host: base.host ?? "", take)
        let session = URLSession(configuration: .ephemeral, delegate: reader, delegateQueue: nil)
        defer { session.invalidateAndCancel() }
        let task = session.dataTask(with: request)
        try await withTaskCancellationHandler {
            try await withCheckedThrowingContinuation { reader.start(task, $0) }
        } onCancel: {
            task.cancel()
        }
        try Task.checkCancellation()
    }
}

/// Bytes that come piece by piece.
private final class Gathered: Sendable {
    private let data = Mutex(Data())

    var all: Data { data.withLock { $0 } }

    func add(_ piece: Data) -> Int {
        data.withLock {
            $0 += piece
            return $0.count
        }
    }
}

/// What URLSession tells of one request.
private final class Reader: NSObject, URLSessionDataDelegate {
    private struct State {
        var end: CheckedContinuation<Void, any Error>?
        var isRest = false
        var error: (any Error)?
    }

    private let path, host: String
    private let take: @Sendable (Data, Bool) throws -> Void
    private let state = Mutex(State())

    init(path: String, host: String, _ take: @escaping @Sendable (Data, Bool) throws -> Void) {
        (self.path, self.host, self.take) = (path, host, take)
    }

    func start(_ task: URLSessionDataTask, _ end: CheckedContinuation<Void, any Error>) {
        state.withLock { $0.end = end }
        task.resume()
    }

    func urlSession(
        _ session: URLSession, dataTask: URLSessionDataTask, didReceive response: URLResponse,
        completionHandler: @escaping (URLSession.ResponseDisposition) -> Void
    ) {
        let status = (response as? HTTPURLResponse)?.statusCode ?? 0
        if status == 416 {  // there is nothing after what is held
            completionHandler(.cancel)
        } else if status == 200 || status == 206 {
            state.withLock { $0.isRest = status == 206 }
            completionHandler(.allow)
        } else {
            fail(ShardmillError(.build, "\(host) answers \(status) for \(path): is this the address of a build?"))
            completionHandler(.cancel)
        }
    }

    func urlSession(_ session: URLSession, dataTask: URLSessionDataTask, didReceive data: Data) {
        do { try take(data, state.withLock { $0.isRest }) } catch {
            fail(error)
            dataTask.cancel()
        }
    }

    func urlSession(_ session: URLSession, task: URLSessionTask, didCompleteWithError error: (any Error)?) {
        let (end, own) = state.withLock { ($0.end, $0.error) }
        if let own {
            end?.resume(throwing: own)
        } else if let error, (error as? URLError)?.code != .cancelled {
            end?.resume(throwing: ShardmillError(.build, "\(host) can't be reached: \(error.localizedDescription)"))
        } else {
            end?.resume()
        }
    }

    private func fail(_ error: any Error) { state.withLock { $0.error = $0.error ?? error } }
}
