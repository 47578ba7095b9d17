import CoreML
import Foundation
import ShardmillDecode

/// The compiled bundles that this system may load: the build's own, or its packages compiled again into a cache.
///
/// Core ML specialises a bundle for one version of the system, and may refuse a bundle of another version, or of another
/// compiler. So only bundles that Apple's compiler made on this version are loaded as they are.
public struct Compiler: Sendable {
    /// Where compiled bundles are kept, a folder for each version of the system. It must be a stable path: the system
    /// keys what it specialises by the bundle's path.
    public let cache: URL

    public init(cache: URL? = nil) {
        let home = FileManager.default.urls(for: .applicationSupportDirectory, in: .userDomainMask).first
        self.cache = cache ?? (home ?? FileManager.default.temporaryDirectory).appendingPathComponent("Shardmill/compiled")
    }

    /// Return the bundle to load for each part that needs another one than the build's.
    ///
    /// - Parameters:
    ///   - manifest: the build's model.json.
    ///   - progress: called before a part is compiled, which takes seconds to minutes.
    /// - Throws: `ShardmillError` if a package is missing or can't be compiled.
    public func bundles(_ manifest: Manifest, progress: @Sendable (Part, Int) -> Void = { _, _ in }) async throws -> [String: URL] {
        var found: [String: URL] = [:]
        for (place, part) in manifest.parts.enumerated() where !isOurs(part) {
            guard let package = manifest.packages[part.name], isFolder(package) else {
                if FileManager.default.fileExists(atPath: part.program.path) { continue }  // loaded as it is
                throw ShardmillError(.build, "\(part.program.path) is missing, and so is its package; copy the build again")
            }
            let bundle = try folder(package).appendingPathComponent("\(part.name).mlmodelc")
            if !isFolder(bundle) {
                progress(part, place)
                try await compile(package, to: bundle)
            }
            found[part.name] = bundle
        }
        return found
    }

    /// Return whether Apple's compiler made a part's bundle on this version of the system.
    private func isOurs(_ part: Part) -> Bool {
        isFolder(part.program) && part.compiler["name"] == "coreml" && part.compiler["build"] == System.build
    }

    /// Return the folder of a package's bundle, by the package's path, sizes and dates, and the system's build.
    private func folder(_ package: URL) throws -> URL {
        var key = "\(package.standardizedFileURL.path)\n\(System.build)\n"
        let files = FileManager.default.enumerator(at: package, includingPropertiesForKeys: nil)
        while let file = files?.nextObject() as? URL {
            let status = try FileManager.default.attributesOfItem(atPath: file.path)
            let date = (status[.modificationDate] as? Date)?.timeIntervalSince1970 ?? 0
            key += "\(file.lastPathComponent) \(status[.size] ?? 0) \(date)\n"
        }
        return cache.appendingPathComponent(fingerprint(key))
    }

    private func compile(_ package: URL, to bundle: URL) async throws {
        do {
            let made = try await MLModel.compileModel(at: package)  // in a temporary folder, which may go at any time
            try FileManager.default.createDirectory(at: bundle.deletingLastPathComponent(), withIntermediateDirectories: true)
            if isFolder(bundle) { return }  // another process was faster
            try FileManager.default.moveItem(at: made, to: bundle)
        } catch {
            throw ShardmillError(.program, "\(package.lastPathComponent) can't be compiled: \(error.localizedDescription)")
        }
    }
}

private func isFolder(_ url: URL) -> Bool {
    var folder: ObjCBool = false
    return FileManager.default.fileExists(atPath: url.path, isDirectory: &folder) && folder.boolValue
}

/// Return a name for a file by its content: FNV-1a, 64 bits, which is enough to tell some packages apart.
private func fingerprint(_ text: String) -> String {
    let hash = text.utf8.reduce(UInt64(0xCBF2_9CE4_8422_2325)) { ($0 ^ UInt64($1)) &* 0x100_0000_01B3 }
    return String(hash, radix: 16)
}

/// The system's version, as bundles name it.
public enum System {
    /// The build of the system, for example 24F74.
    public static var build: String {
        let text = ProcessInfo.processInfo.operatingSystemVersionString  // "Version 15.5 (Build 24F74)"
        guard let start = text.range(of: "(Build ") else { return text }
        return String(text[start.upperBound...].dropLast())
    }
}
