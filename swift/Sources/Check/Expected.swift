import Foundation
import ShardmillCoreML
import ShardmillDecode

/// Compare a build's programs with the results that it carries, and print a line for each; return whether all are right.
///
/// - Parameter arguments: BUILD [--engine coreml|pipe]. Through the pipe the lines go to standard error.
func check(_ arguments: [String]) async throws -> Bool {
    let command = try Command(arguments + ["--requests", "-"])
    let manifest = try Manifest(folder: command.build).withoutDrafter
    guard let file = manifest.expected else {
        throw ShardmillError(.build, "\(command.build.path) has no expected results: it was built before there were any")
    }
    let expected = try Expected(file)
    let backend: any Backend
    if command.engine == .pipe {
        backend = try openPipe()
    } else {
        backend = CoreMLBackend(bundles: try await Compiler().bundles(manifest) { _, _ in }, manifest: manifest)
    }
    let engine = try Engine(manifest, backend: backend)
    var areRight = true
    try engine.check(expected, precision: command.engine == .pipe ? "fp32" : "fp16") { part in
        areRight = areRight && part.isRight
        let errors = part.errors.map { String(format: "%@ %.2g", $0.way, $0.error) }.joined(separator: ", ")
        let state = part.limit == nil ? "not compared" : part.isRight ? "right" : "wrong"
        let limit = part.limit.map { String(format: ", at most %.2g", $0) } ?? ""
        let said = [errors + limit, part.remark].filter { !$0.isEmpty }.joined(separator: "; ")
        FileHandle.standardError.write(Data("\(part.name): \(state): \(said)\n".utf8))
    }
    return areRight
}
